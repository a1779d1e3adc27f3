/* An emulated libcuda.so.1: just enough of the driver API for NVIDIA's own bindings, and for our C allocator, to run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "model.h"
#include "streams.h"
#include "vmm.h"

typedef int Result;
typedef uintptr_t Ptr;

static int initialized;
static __thread void *stack[16];
static __thread int depth;
static int primary[8]; /* a context is the address of its device's slot */

#define FINISH(code) do { int code_ = (code); pthread_mutex_unlock(&emu_lock); return code_; } while (0)
#define ENTER(name)                                                      \
    emu_setup();                                                         \
    pthread_mutex_lock(&emu_lock);                                       \
    do { int told = emu_enter(name); if (told) FINISH(told); } while (0)
#define ENTER_READY(name) ENTER(name); if (!initialized) FINISH(NOT_INITIALIZED)
#define ENTER_CONTEXT(name) ENTER_READY(name); if (!depth || !stack[depth - 1]) FINISH(INVALID_CONTEXT)

static int version_of_driver(void) { const char *v = getenv("GH200_EMU_VERSION"); return v ? atoi(v) : 13000; }
static int devices(void) { const char *n = getenv("GH200_EMU_DEVICES"); return n ? atoi(n) : 1; }

Result cuInit(unsigned flags) {
    (void)flags;
    ENTER("cuInit");
    if (devices() == 0) FINISH(NO_DEVICE);
    initialized = 1;
    FINISH(OK);
}
Result cuDriverGetVersion(int *out) {
    ENTER("cuDriverGetVersion");
    *out = version_of_driver();
    FINISH(OK);
}
Result cuDeviceGetCount(int *out) { ENTER_READY("cuDeviceGetCount"); *out = devices(); FINISH(OK); }
Result cuDeviceGet(int *out, int n) {
    ENTER_READY("cuDeviceGet");
    if (n < 0 || n >= devices()) FINISH(INVALID_DEVICE);
    *out = n;
    FINISH(OK);
}
Result cuDeviceGetName(char *out, int len, int dev) {
    (void)dev;
    ENTER_READY("cuDeviceGetName");
    snprintf(out, (size_t)len, "%s", emu_machine->label);
    FINISH(OK);
}
Result cuDeviceTotalMem_v2(size_t *out, int dev) {
    (void)dev;
    ENTER_READY("cuDeviceTotalMem");
    *out = emu_hbm;
    FINISH(OK);
}
Result cuDeviceGetAttribute(int *out, int attribute, int dev) {
    ENTER_READY("cuDeviceGetAttribute");
    if (dev < 0 || dev >= devices()) FINISH(INVALID_DEVICE);
    const Personality *m = emu_machine;
    switch (attribute) {
        case 18: *out = m->integrated; break;
        case 19: case 102: *out = 1; break;
        case 141: *out = m->node_vmm; break;
        case 83: *out = m->managed; break;
        case 88: *out = m->pageable; break;
        case 91: *out = 1; break;
        case 89: *out = m->concurrent; break;
        case 99: *out = m->host_register; break;
        case 100: *out = m->page_tables; break;
        case 101: *out = m->direct; break;
        case 130: *out = m->numa; break;
        case 131: *out = m->numa_id; break;
        case 134: *out = m->host_numa; break;
        default: *out = 0;
    }
    FINISH(OK);
}

/* -- contexts ------------------------------------------------------------------------------------------------ */

Result cuDevicePrimaryCtxRetain(void **out, int dev) {
    ENTER_READY("cuDevicePrimaryCtxRetain");
    if (dev < 0 || dev >= devices()) FINISH(INVALID_DEVICE);
    *out = &primary[dev];
    FINISH(OK);
}
Result cuDevicePrimaryCtxRelease_v2(int dev) { (void)dev; ENTER_READY("cuDevicePrimaryCtxRelease"); FINISH(OK); }
Result cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active) {
    (void)dev;
    ENTER_READY("cuDevicePrimaryCtxGetState");
    *flags = 0, *active = 1;
    FINISH(OK);
}
Result cuCtxGetCurrent(void **out) {
    ENTER_READY("cuCtxGetCurrent");
    *out = depth ? stack[depth - 1] : NULL;
    FINISH(OK);
}
Result cuCtxSetCurrent(void *ctx) {
    ENTER_READY("cuCtxSetCurrent");
    if (!depth) depth = 1;
    stack[depth - 1] = ctx;
    FINISH(OK);
}
Result cuCtxPushCurrent_v2(void *ctx) {
    ENTER_READY("cuCtxPushCurrent");
    if (depth == 16) FINISH(INVALID_VALUE);
    stack[depth++] = ctx;
    FINISH(OK);
}
Result cuCtxPopCurrent_v2(void **out) {
    ENTER_READY("cuCtxPopCurrent");
    if (!depth) FINISH(INVALID_CONTEXT);
    void *top = stack[--depth];
    if (out) *out = top;
    FINISH(OK);
}
Result cuCtxGetDevice(int *out) {
    ENTER_CONTEXT("cuCtxGetDevice");
    *out = (int)((int *)stack[depth - 1] - primary);
    FINISH(OK);
}
int emu_context_depth(void) { return depth; }
static int current_device(void) { return (int)((int *)stack[depth - 1] - primary); }

/* -- memory -------------------------------------------------------------------------------------------------- */

Result cuMemGetInfo_v2(size_t *free_, size_t *total) {
    ENTER_CONTEXT("cuMemGetInfo");
    *free_ = emu_hbm > hbm_used() ? emu_hbm - hbm_used() : 0;
    *total = emu_hbm;
    FINISH(OK);
}
static Result allocate(Ptr *out, size_t size, Kind kind) {
    if (!size) return INVALID_VALUE;
    if (kind == DEVICE && !hbm_make_room(size, 0, 0)) return OUT_OF_MEMORY;
    size_t page = emu_machine->page; /* aligned, so that no two allocations share a page */
    size_t whole = (size + page - 1) / page * page;
    char *raw = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return OUT_OF_MEMORY;
    Ptr start = ((Ptr)raw + page - 1) / page * page;
    if (start > (Ptr)raw) munmap(raw, start - (Ptr)raw);
    if ((Ptr)raw + page > start) munmap((char *)start + whole, (Ptr)raw + page - start);
    *out = start;
    pages_forget(start, whole);
    return alloc_add(kind, start, size, current_device());
}
Result cuMemAlloc_v2(Ptr *out, size_t size) { ENTER_CONTEXT("cuMemAlloc"); FINISH(allocate(out, size, DEVICE)); }
Result cuMemAllocManaged(Ptr *out, size_t size, unsigned flags) {
    ENTER_CONTEXT("cuMemAllocManaged");
    if (flags != 1 && flags != 2) FINISH(INVALID_VALUE);
    if (!emu_machine->managed) FINISH(NOT_SUPPORTED);
    FINISH(allocate(out, size, MANAGED));
}
Result cuMemFree_v2(Ptr at) {
    ENTER_CONTEXT("cuMemFree");
    Allocation *found = alloc_find(at, 1);
    if (!found || found->start != at || (found->kind != MANAGED && found->kind != DEVICE)) FINISH(INVALID_VALUE);
    streams_finish();
    size_t page = emu_machine->page, whole = (found->size + page - 1) / page * page;
    if (found->kind == MANAGED) pages_forget(found->start, found->size);
    munmap((void *)at, whole);
    alloc_remove(found);
    FINISH(OK);
}
Result cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    (void)flags;
    ENTER_CONTEXT("cuMemHostRegister");
    if (!emu_machine->host_register) FINISH(NOT_SUPPORTED);
    if (!size || !at) FINISH(INVALID_VALUE);
    if (alloc_find((Ptr)at, 1)) FINISH(ALREADY_REGISTERED);
    FINISH(alloc_add(REGISTERED, (Ptr)at, size, current_device()));
}
Result cuMemHostUnregister(void *at) {
    ENTER_CONTEXT("cuMemHostUnregister");
    Allocation *found = alloc_find((Ptr)at, 1);
    if (!found || found->kind != REGISTERED || found->start != (Ptr)at) FINISH(NOT_REGISTERED);
    unsigned char present[1]; /* memory that was unmapped before it was unregistered is a bug of the caller's */
    if (mincore((void *)((Ptr)at & ~4095ul), 1, present) != 0) {
        dprintf(2, "emulated driver: cuMemHostUnregister after the mapping was gone\n");
        abort();
    }
    alloc_remove(found);
    FINISH(OK);
}
Result cuPointerGetAttribute(void *out, int attribute, Ptr at) {
    ENTER_CONTEXT("cuPointerGetAttribute");
    Allocation *found = alloc_find(at, 1);
    if (!found) FINISH(INVALID_VALUE);
    if (attribute == 2) *(unsigned *)out = found->kind == REGISTERED || found->kind == PINNED_HOST ? 1 : 2;
    else if (attribute == 8) *(unsigned *)out = found->kind == MANAGED;
    else if (attribute == 9) *(int *)out = found->device;
    else FINISH(INVALID_VALUE);
    FINISH(OK);
}

/* -- host memory of the driver's own, and its virtual memory calls --------------------------------------------- */

Result cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER_CONTEXT("cuMemHostAlloc");
    if (flags != 3) FINISH(INVALID_VALUE); /* portable and mapped is what the pool needs */
    FINISH(pinned_take(out, size, current_device()));
}
Result cuMemFreeHost(void *at) { ENTER_CONTEXT("cuMemFreeHost"); FINISH(pinned_free(at)); }
Result cuMemGetAllocationGranularity(size_t *out, const Properties *p, int option) {
    (void)option;
    ENTER_READY("cuMemGetAllocationGranularity");
    FINISH(vmm_granularity(out, p, devices()));
}
Result cuMemCreate(uint64_t *out, size_t size, const Properties *p, unsigned long long flags) {
    ENTER_CONTEXT("cuMemCreate");
    FINISH(flags ? INVALID_VALUE : vmm_create(out, size, p, devices()));
}
Result cuMemRelease(uint64_t handle) { ENTER_READY("cuMemRelease"); FINISH(vmm_release(handle)); }
Result cuMemAddressReserve(Ptr *out, size_t size, size_t align, Ptr at, unsigned long long flags) {
    ENTER_READY("cuMemAddressReserve");
    FINISH(at || flags ? INVALID_VALUE : vmm_reserve(out, size, align));
}
Result cuMemAddressFree(Ptr at, size_t size) { ENTER_READY("cuMemAddressFree"); FINISH(vmm_unreserve(at, size)); }
Result cuMemMap(Ptr at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER_CONTEXT("cuMemMap");
    FINISH(flags ? INVALID_VALUE : vmm_map(at, size, offset, handle, current_device()));
}
Result cuMemUnmap(Ptr at, size_t size) { ENTER_READY("cuMemUnmap"); FINISH(vmm_unmap(at, size)); }
Result cuMemSetAccess(Ptr at, size_t size, const Access *wanted, size_t count) {
    ENTER_READY("cuMemSetAccess");
    FINISH(vmm_access(at, size, wanted, count));
}
Result cuMemRetainAllocationHandle(uint64_t *out, void *at) {
    ENTER_CONTEXT("cuMemRetainAllocationHandle");
    FINISH(vmm_retain(out, (Ptr)at));
}
Result cuMemGetAllocationPropertiesFromHandle(Properties *out, uint64_t handle) {
    ENTER_READY("cuMemGetAllocationPropertiesFromHandle");
    FINISH(vmm_properties(out, handle));
}

/* -- advice, prefetch, read-back ------------------------------------------------------------------------------- */

static int decode(Location where, int *out) {
    if (where.type == 1 && where.id >= 0 && where.id < devices()) { *out = where.id; return OK; }
    if (where.type == 2) { *out = HOST; return OK; }
    if (where.type == 3 && where.id >= 0) { *out = NODE_BASE - where.id; return OK; }
    return INVALID_VALUE;
}
static Result advise(Ptr at, size_t size, int advice, Location location) {
    int where = NOWHERE;
    if (!size || !pages_advisable(at, size) || advice < 1 || advice > 6) return INVALID_VALUE;
    if ((advice == 3 || advice >= 5) && decode(location, &where)) return INVALID_VALUE;
    if ((advice == 3 || advice == 5) && where >= 0 && !emu_machine->concurrent) return INVALID_DEVICE;
    if (emu_lying) return OK;
    for (Ptr p = at - at % emu_machine->page; p < at + size; p += emu_machine->page) {
        Page *page = page_at(p, 1);
        unsigned bit = where >= 0 ? 1u << where : 1u << 31;
        switch (advice) {
            case 1: page->mostly = 1; break;
            case 2: page->mostly = 0; break;
            case 3: page->preferred = (short)where; break;
            case 4: page->preferred = NOWHERE; break;
            case 5: page->accessed |= bit; break;
            case 6: page->accessed &= ~bit; break;
        }
    }
    return OK;
}
static Location legacy(int device) { return device < 0 ? (Location){2, 0} : (Location){1, device}; }

Result cuMemAdvise(Ptr at, size_t size, int advice, int device) {
    ENTER_CONTEXT("cuMemAdvise");
    FINISH(advise(at, size, advice, legacy(device)));
}
Result cuMemAdvise_v2(Ptr at, size_t size, int advice, Location where) {
    ENTER_CONTEXT("cuMemAdvise");
    FINISH(advise(at, size, advice, where));
}
static Result prefetch(Ptr at, size_t size, Location location, void *stream) {
    int where;
    if (!size || !pages_advisable(at, size) || decode(location, &where)) return INVALID_VALUE;
    if (where >= 0 && !emu_machine->concurrent) return INVALID_DEVICE;
    if (emu_lying) return OK;
    int target = pages_target(at, size, where);
    /* As on the real driver the record says where it was sent, whether or not it has got there yet. */
    for (Ptr p = at - at % emu_machine->page; p < at + size; p += emu_machine->page) page_at(p, 1)->last = (short)target;
    return stream_prefetch(stream, at, size, target);
}
Result cuMemPrefetchAsync(Ptr at, size_t size, int device, void *stream) {
    ENTER_CONTEXT("cuMemPrefetchAsync");
    FINISH(prefetch(at, size, legacy(device), stream));
}
Result cuMemPrefetchAsync_v2(Ptr at, size_t size, Location where, unsigned flags, void *stream) {
    ENTER_CONTEXT("cuMemPrefetchAsync");
    if (flags) FINISH(INVALID_VALUE);
    FINISH(prefetch(at, size, where, stream));
}
Result cuMemPrefetchBatchAsync(Ptr *at, size_t *sizes, size_t count, Location *locations, size_t *first, size_t groups,
                               unsigned long long flags, void *stream) {
    ENTER_CONTEXT("cuMemPrefetchBatchAsync");
    if (!count || !groups || flags || first[0] || !stream) FINISH(INVALID_VALUE); /* no null stream */
    for (size_t i = 0, group = 0; i < count; i++) {
        while (group + 1 < groups && first[group + 1] <= i) group++;
        int code = prefetch(at[i], sizes[i], locations[group], stream);
        if (code) FINISH(code);
    }
    FINISH(OK);
}

static int type_of(int where) { return where >= 0 ? 1 : where == HOST ? 2 : where <= NODE_BASE ? 3 : 0; }
static int id_of(int where) { return where >= 0 ? where : where <= NODE_BASE ? NODE_BASE - where : 0; }
static int seen_at(const Page *page, int attribute) {
    if (attribute == 1) return page->mostly;
    return attribute == 2 || attribute == 5 || attribute == 6 ? page->preferred : page->last;
}
static void tell_accessed(int *out, size_t room, unsigned all) {
    size_t n = 0;
    if (all >> 31 && n < room) out[n++] = -1;
    for (int d = 0; d < 8 && n < room; d++) if (all >> d & 1) out[n++] = d;
    while (n < room) out[n++] = -2;
}
Result cuMemRangeGetAttribute(void *out, size_t bytes, int attribute, Ptr at, size_t size) {
    ENTER_CONTEXT("cuMemRangeGetAttribute");
    Allocation *found = alloc_find(at, size); /* documented for managed memory only, though advice takes more */
    if (!size || !found || found->kind != MANAGED || attribute < 1 || attribute > 8) FINISH(INVALID_VALUE);
    if (attribute > 4 && version_of_driver() < 12030) FINISH(INVALID_VALUE); /* locations by type and id came later */
    int common = 0, first = 1;
    unsigned all = ~0u;
    for (Ptr p = at - at % emu_machine->page; p < at + size; p += emu_machine->page, first = 0) {
        Page *page = page_at(p, 1);
        int now = seen_at(page, attribute);
        all &= page->accessed;
        if (first) common = now;
        else if (common != now) common = attribute == 1 ? 0 : NOWHERE;
    }
    if (attribute == 3) tell_accessed(out, bytes / 4, all);
    else if (attribute == 5 || attribute == 7) *(int *)out = type_of(common);
    else if (attribute == 6 || attribute == 8) *(int *)out = id_of(common);
    else *(int *)out = common <= NODE_BASE ? HOST : common;
    FINISH(OK);
}

/* -- order and copies ------------------------------------------------------------------------------------------ */

Result cuStreamCreate(void **out, unsigned f) { (void)f; ENTER_CONTEXT("cuStreamCreate"); FINISH(stream_make(out)); }
Result cuStreamDestroy_v2(void *s) { ENTER_CONTEXT("cuStreamDestroy"); FINISH(stream_drop(s)); }
Result cuStreamSynchronize(void *s) { ENTER_CONTEXT("cuStreamSynchronize"); FINISH(stream_finish(s)); }
Result cuStreamWaitEvent(void *s, void *e, unsigned f) {
    (void)f;
    ENTER_CONTEXT("cuStreamWaitEvent");
    FINISH(event_await(s, e));
}
Result cuEventCreate(void **out, unsigned f) { (void)f; ENTER_CONTEXT("cuEventCreate"); FINISH(event_make(out)); }
Result cuEventDestroy_v2(void *e) { ENTER_CONTEXT("cuEventDestroy"); FINISH(event_drop(e)); }
Result cuEventRecord(void *e, void *s) { ENTER_CONTEXT("cuEventRecord"); FINISH(event_record(e, s)); }
Result cuEventQuery(void *e) { ENTER_CONTEXT("cuEventQuery"); FINISH(event_query(e)); }
Result cuEventSynchronize(void *e) { ENTER_CONTEXT("cuEventSynchronize"); FINISH(event_finish(e)); }
Result cuEventElapsedTime(float *out, void *first, void *second) {
    ENTER_CONTEXT("cuEventElapsedTime");
    FINISH(event_elapsed(out, first, second));
}
Result cuEventElapsedTime_v2(float *out, void *first, void *second) { return cuEventElapsedTime(out, first, second); }
Result cuCtxSynchronize(void) { ENTER_CONTEXT("cuCtxSynchronize"); streams_finish(); FINISH(OK); }
Result cuMemcpyAsync(Ptr to, Ptr from, size_t size, void *stream) {
    ENTER_CONTEXT("cuMemcpyAsync");
    Allocation *a = alloc_find(to, 1), *b = alloc_find(from, 1);
    if ((a && to + size > a->start + a->size) || (b && from + size > b->start + b->size)) FINISH(INVALID_VALUE);
    if (!vmm_reachable(to) || !vmm_reachable(from)) FINISH(700); /* an illegal address */
    FINISH(stream_copy(stream, to, from, size));
}
Result cuMemcpy(Ptr to, Ptr from, size_t size) {
    ENTER_CONTEXT("cuMemcpy");
    streams_finish();
    memmove((void *)to, (void *)from, size);
    FINISH(OK);
}

/* -- names ------------------------------------------------------------------------------------------------------- */

static const struct { int code; const char *name; } names[] = {
    {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
};
Result cuGetErrorName(int code, const char **out) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) { *out = names[i].name; return OK; }
    *out = NULL;
    return INVALID_VALUE;
}
Result cuGetErrorString(int code, const char **out) { return cuGetErrorName(code, out); }

/* One name means another ABI from some version on; the rest carries at most one suffix. */
Result cuGetProcAddress_v2(const char *symbol, void **out, int version, unsigned long long flags, int *status) {
    (void)flags;
    char newer[96];
    Dl_info here;
    *out = NULL;
    if (status) *status = 1;
    if (!strcmp(symbol, "cuMemPrefetchBatchAsync") && version_of_driver() < 13000) return NOT_FOUND;
    dladdr((void *)cuInit, &here);
    void *self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    int two_shapes = !strcmp(symbol, "cuMemAdvise") || !strcmp(symbol, "cuMemPrefetchAsync");
    snprintf(newer, sizeof newer, "%s_v2", symbol);
    *out = two_shapes && version < 12020 ? NULL : dlsym(self, newer);
    if (!*out) *out = dlsym(self, symbol);
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
