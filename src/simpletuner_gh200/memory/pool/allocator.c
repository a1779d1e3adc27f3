/* A torch.cuda.MemPool allocator over CUDA managed memory. No CUDA headers: libcuda is found at run time.
 *
 * Python callbacks would deadlock with torch's statistics on another thread, hence C. Every function is safe from any
 * thread. NULL means "no memory": torch then raises its OutOfMemoryError.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

enum { SET_PREFERRED_LOCATION = 3, SET_ACCESSED_BY = 5, ATTACH_GLOBAL = 1, CPU = -1 };
enum { GPU_FIRST = 0, BALANCED = 1, CPU_FIRST = 2 };

typedef int (*AllocManaged)(uintptr_t *, size_t, unsigned);
typedef int (*Free)(uintptr_t);
typedef int (*Advise)(uintptr_t, size_t, int, int); /* the first ABI; newer drivers still export it by this name */
typedef int (*Retain)(void **, int);
typedef int (*Push)(void *);
typedef int (*Pop)(void **);
typedef int (*Init)(unsigned);

static struct { AllocManaged alloc; Free free; Advise advise; Retain retain; Push push; Pop pop; } cuda;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t limit, held, peak, allocations, refused, unadvised;
static int pattern, last_error;
static pid_t owner;

static int load(void) {
    if (cuda.alloc) return 1;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 0;
    Init init = (Init)dlsym(library, "cuInit");
    cuda.free = (Free)dlsym(library, "cuMemFree_v2");
    cuda.advise = (Advise)dlsym(library, "cuMemAdvise");
    cuda.retain = (Retain)dlsym(library, "cuDevicePrimaryCtxRetain");
    cuda.push = (Push)dlsym(library, "cuCtxPushCurrent_v2");
    cuda.pop = (Pop)dlsym(library, "cuCtxPopCurrent_v2");
    AllocManaged alloc = (AllocManaged)dlsym(library, "cuMemAllocManaged");
    if (!init || !cuda.free || !cuda.advise || !cuda.retain || !cuda.push || !cuda.pop || !alloc || init(0)) return 0;
    cuda.alloc = alloc;
    return 1;
}

static int enter(int device) {
    void *context;
    return !cuda.retain(&context, device) && !cuda.push(context);
}

static void leave(void) {
    void *context;
    cuda.pop(&context);
}

/* Slab-level advice: torch cuts many tensors from one allocation, so it holds for all of them. */
static int advise(uintptr_t at, size_t size, int device) {
    switch (pattern) {
        case GPU_FIRST:
            return cuda.advise(at, size, SET_PREFERRED_LOCATION, device) || cuda.advise(at, size, SET_ACCESSED_BY, CPU);
        case CPU_FIRST:
            return cuda.advise(at, size, SET_PREFERRED_LOCATION, CPU) || cuda.advise(at, size, SET_ACCESSED_BY, device);
        default:
            return cuda.advise(at, size, SET_ACCESSED_BY, device);
    }
}

/* 1 when the pool can work; 0 when there is no usable driver. Counters start anew only with the first call. */
int gh200_pool_configure(uint64_t limit_bytes, int access_pattern) {
    pthread_mutex_lock(&lock);
    int usable = load();
    limit = limit_bytes, pattern = access_pattern;
    if (!owner) owner = getpid();
    pthread_mutex_unlock(&lock);
    return usable;
}

void *gh200_pool_alloc(ssize_t size, int device, void *stream) {
    (void)stream;
    uintptr_t at = 0;
    if (size <= 0) return NULL;
    pthread_mutex_lock(&lock);
    /* A forked child must not touch the parent's CUDA state. */
    int may = owner == getpid() && cuda.alloc && held + (uint64_t)size <= limit && enter(device);
    if (may) {
        last_error = cuda.alloc(&at, (size_t)size, ATTACH_GLOBAL);
        if (last_error) at = 0;
        else if (advise(at, (size_t)size, device)) unadvised++;
        leave();
    }
    if (at) {
        held += (uint64_t)size, allocations++;
        if (held > peak) peak = held;
    } else refused++;
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

void gh200_pool_free(void *at, ssize_t size, int device, void *stream) {
    (void)stream;
    if (!at) return;
    pthread_mutex_lock(&lock);
    if (owner == getpid() && cuda.free && enter(device)) {
        last_error = cuda.free((uintptr_t)at);
        if (!last_error) held -= (uint64_t)size;
        leave();
    }
    pthread_mutex_unlock(&lock);
}

/* held, peak, limit, allocations, refused, unadvised, last error */
void gh200_pool_read(uint64_t out[7]) {
    pthread_mutex_lock(&lock);
    out[0] = held, out[1] = peak, out[2] = limit, out[3] = allocations, out[4] = refused, out[5] = unadvised;
    out[6] = (uint64_t)last_error;
    pthread_mutex_unlock(&lock);
}
