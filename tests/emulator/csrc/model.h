/* What the emulated driver knows: a machine, its pages, its allocations, and the failures it was told to produce. */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712,
       NOT_REGISTERED = 713, NOT_SUPPORTED = 801 };

/* Where a page is: NOWHERE, HOST, a device from 0 up, or NODE_BASE - n for CPU node n. */
enum { NOWHERE = -2, HOST = -1, NODE_BASE = -10 };

typedef struct { int type; int id; } Location; /* CUmemLocation */

typedef struct {
    const char *name, *label;
    int managed, concurrent, pageable, page_tables, direct, host_register, integrated, numa, numa_id, host_numa;
    size_t page;
    int node_vmm, node_refused, vmm_crashes;
    double link, vmm_link; /* bytes per second, as the device reads host memory and memory of the virtual memory calls */
    int system_prefetch_stays; /* CDMM: a prefetch of system memory to the GPU lands on the CPU */
} Personality;

typedef struct { uintptr_t number; short where, preferred, last; unsigned char mostly; unsigned accessed; } Page;

typedef enum { MANAGED = 1, DEVICE = 2, REGISTERED = 3, PINNED_HOST = 4, MAPPED = 5 } Kind;

typedef struct { Kind kind; uintptr_t start; size_t size; int device; } Allocation;

extern pthread_mutex_t emu_lock;
extern const Personality *emu_machine;
extern size_t emu_hbm, emu_grace;
extern int emu_lying;
extern unsigned long emu_faults, emu_migrations, emu_evictions, emu_prefetches, emu_copies;

int emu_enter(const char *call); /* 0, or the code this call was told to fail with; guards fork */
void emu_setup(void);

Allocation *alloc_find(uintptr_t address, size_t size);
int alloc_add(Kind kind, uintptr_t start, size_t size, int device);
void alloc_remove(Allocation *found);
size_t alloc_count(Kind kind);
size_t pinned_bytes(void);
size_t hbm_used(void);
double copy_seconds(uintptr_t to, uintptr_t from, size_t size);
int hbm_make_room(size_t bytes, uintptr_t protect_from, uintptr_t protect_to);

Page *page_at(uintptr_t address, int create);
void pages_forget(uintptr_t start, size_t size);
int pages_advisable(uintptr_t start, size_t size);
int pages_target(uintptr_t start, size_t size, int where);
int pages_move(uintptr_t start, size_t size, int target, int is_prefetch);
