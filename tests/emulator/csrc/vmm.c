/* Host memory that the driver itself hands out: pinned, and mapped by the virtual memory calls. Their rules are kept:
 * a handle lives until it is released and unmapped, an address range is freed with the size it was reserved with, memory
 * is reached only where access was set, and Grace has an end. */
#define _GNU_SOURCE
#include "vmm.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "streams.h"

enum { UNIT = 2 << 20, AT_DEVICE = 1, AT_HOST_NUMA = 3, PINNED = 1, READ_WRITE = 3, MOST = 4096 };

typedef struct { int used, released, mappings; size_t size; Properties properties; } Handle;
typedef struct { uintptr_t start; size_t size; int handle, reachable; } Mapping; /* handle -1: reserved only */

static Handle handles[MOST];
static Mapping ranges[MOST];
static int range_count;
size_t emu_grace;

static int on_host(const Properties *p) { return p->where.type == AT_HOST_NUMA; }

size_t grace_used(void) {
    size_t bytes = pinned_bytes();
    for (int i = 0; i < MOST; i++) bytes += handles[i].used && on_host(&handles[i].properties) ? handles[i].size : 0;
    return bytes;
}
size_t vmm_handles(void) { size_t n = 0; for (int i = 0; i < MOST; i++) n += handles[i].used != 0; return n; }
size_t vmm_ranges(void) { return (size_t)range_count; }
void emu_set_grace(size_t bytes) { emu_grace = bytes; }

static int grace_has(size_t size) { return !emu_grace || grace_used() + size <= emu_grace; }

int pinned_take(void **out, size_t size, int device) {
    if (!size) return INVALID_VALUE;
    if (!grace_has(size)) return OUT_OF_MEMORY;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    *out = at;
    return alloc_add(PINNED_HOST, (uintptr_t)at, size, device);
}
int pinned_free(void *at) {
    Allocation *found = alloc_find((uintptr_t)at, 1);
    if (!found || found->kind != PINNED_HOST || found->start != (uintptr_t)at) return INVALID_VALUE;
    streams_finish();
    munmap(at, found->size);
    alloc_remove(found);
    return OK;
}

static int sound(const Properties *p, int devices) {
    if (p->type != PINNED || p->handles || p->windows) return 0;
    if (p->where.type == AT_DEVICE) return p->where.id >= 0 && p->where.id < devices;
    return p->where.type == AT_HOST_NUMA && p->where.id >= 0;
}
int vmm_granularity(size_t *out, const Properties *p, int devices) {
    if (!sound(p, devices)) return INVALID_VALUE;
    *out = UNIT;
    return OK;
}
int vmm_create(uint64_t *out, size_t size, const Properties *p, int devices) {
    if (on_host(p) && emu_machine->vmm_crashes) raise(SIGSEGV);
    if (!sound(p, devices) || !size || size % UNIT) return INVALID_VALUE;
    if (!emu_machine->node_vmm && on_host(p)) return NOT_SUPPORTED;
    if (on_host(p) && (emu_machine->node_refused || p->where.id != emu_machine->host_numa)) return INVALID_VALUE;
    if (on_host(p) ? !grace_has(size) : !hbm_make_room(size, 0, 0)) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!handles[i].used) {
            handles[i] = (Handle){1, 0, 0, size, *p};
            *out = (uint64_t)i + 1;
            return OK;
        }
    return OUT_OF_MEMORY;
}
static Handle *handle_of(uint64_t handle) {
    return handle >= 1 && handle <= MOST && handles[handle - 1].used ? &handles[handle - 1] : NULL;
}
static void end_if_unused(Handle *h) { if (h->released > 0 && !h->mappings) h->used = 0; }
int vmm_release(uint64_t handle) {
    Handle *h = handle_of(handle);
    if (!h || h->released > 0) return INVALID_VALUE;
    h->released++;
    end_if_unused(h);
    return OK;
}
static Mapping *range_at(uintptr_t at) {
    for (int i = 0; i < range_count; i++)
        if (at >= ranges[i].start && at < ranges[i].start + ranges[i].size) return &ranges[i];
    return NULL;
}
int vmm_reserve(uintptr_t *out, size_t size, size_t align) {
    if (!size || size % UNIT || range_count == MOST) return INVALID_VALUE;
    if (align < UNIT) align = UNIT;
    char *raw = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return OUT_OF_MEMORY;
    uintptr_t start = ((uintptr_t)raw + align - 1) / align * align, end = (uintptr_t)raw + size + align;
    if (start > (uintptr_t)raw) munmap(raw, start - (uintptr_t)raw);
    if (end > start + size) munmap((void *)(start + size), end - start - size);
    ranges[range_count++] = (Mapping){start, size, -1, 0};
    *out = start;
    return OK;
}
int vmm_unreserve(uintptr_t at, size_t size) {
    Mapping *range = range_at(at);
    if (!range || range->start != at || range->size != size || range->handle >= 0) return INVALID_VALUE;
    munmap((void *)at, size);
    *range = ranges[--range_count];
    return OK;
}
int vmm_map(uintptr_t at, size_t size, size_t offset, uint64_t handle, int device) {
    Mapping *range = range_at(at);
    Handle *h = handle_of(handle);
    if (!range || !h || h->released || range->start != at || range->size != size || offset) return INVALID_VALUE;
    if (range->handle >= 0 || size > h->size) return INVALID_VALUE;
    range->handle = (int)handle - 1, range->reachable = 0;
    h->mappings++;
    return alloc_add(MAPPED, at, size, device);
}
int vmm_unmap(uintptr_t at, size_t size) {
    Mapping *range = range_at(at);
    if (!range || range->start != at || range->size != size || range->handle < 0) return INVALID_VALUE;
    streams_finish();
    mprotect((void *)at, size, PROT_NONE);
    Handle *h = &handles[range->handle];
    h->mappings--;
    end_if_unused(h);
    range->handle = -1;
    alloc_remove(alloc_find(at, 1));
    return OK;
}
int vmm_access(uintptr_t at, size_t size, const Access *wanted, size_t count) {
    Mapping *range = range_at(at);
    if (!range || range->handle < 0 || at != range->start || size != range->size || !count) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (wanted[i].flags != READ_WRITE) return INVALID_VALUE;
        if (wanted[i].where.type == AT_DEVICE) range->reachable = 1;
    }
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : OK;
}
/* Is the memory at this address mapped for the device? Memory that is not of these calls is. */
int vmm_reachable(uintptr_t at) {
    Mapping *range = range_at(at);
    return !range || (range->handle >= 0 && range->reachable);
}
int emu_forbid(uintptr_t at) { /* as if access had never been set; not under the lock */
    Mapping *range = range_at(at);
    if (range) range->reachable = 0;
    return range ? 0 : 1;
}
int vmm_retain(uint64_t *out, uintptr_t at) {
    Mapping *range = range_at(at);
    if (!range || range->handle < 0) return INVALID_VALUE;
    handles[range->handle].released--; /* one more to release */
    *out = (uint64_t)range->handle + 1;
    return OK;
}
int vmm_properties(Properties *out, uint64_t handle) {
    Handle *h = handle_of(handle);
    if (!h) return INVALID_VALUE;
    *out = h->properties;
    return OK;
}
