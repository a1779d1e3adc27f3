/* Pinned and mapped host memory of the emulated driver; every function is called under emu_lock and returns a CUresult. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "model.h"

typedef struct { int type, handles; Location where; void *windows; unsigned char compression, rdma; unsigned short usage; int zero; } Properties;
typedef struct { Location where; int flags; } Access;

int pinned_take(void **out, size_t size, int device);
int pinned_free(void *at);
int vmm_granularity(size_t *out, const Properties *p, int devices);
int vmm_create(uint64_t *out, size_t size, const Properties *p, int devices);
int vmm_release(uint64_t handle);
int vmm_reserve(uintptr_t *out, size_t size, size_t align);
int vmm_unreserve(uintptr_t at, size_t size);
int vmm_map(uintptr_t at, size_t size, size_t offset, uint64_t handle, int device);
int vmm_unmap(uintptr_t at, size_t size);
int vmm_access(uintptr_t at, size_t size, const Access *wanted, size_t count);
int vmm_reachable(uintptr_t at);
int vmm_retain(uint64_t *out, uintptr_t at);
int vmm_properties(Properties *out, uint64_t handle);
size_t vmm_handles(void);
size_t vmm_ranges(void);
size_t grace_used(void);
