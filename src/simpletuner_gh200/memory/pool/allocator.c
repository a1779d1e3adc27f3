/* A torch.cuda.MemPool allocator over Grace memory. No CUDA headers: libcuda is found at run time.
 *
 * Python callbacks would deadlock with torch's statistics on another thread, hence C. Every function is safe from any
 * thread. NULL means "no memory": torch then raises its OutOfMemoryError. Two mechanisms, one per process:
 * pinned host memory on the CPU node of the GPU, and host memory mapped by the driver's virtual memory calls. Neither
 * migrates.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { HOST = 1, VMM = 2 };
enum { REFUSED_LIMIT = 1, REFUSED_HOST = 2, REFUSED_DRIVER = 3 };
enum { PORTABLE_AND_MAPPED = 3, PINNED = 1, READ_WRITE = 3 };
enum { AT_DEVICE = 1, AT_HOST_NUMA = 3, MPOL_DEFAULT_ = 0, MPOL_BIND_ = 2, NODE_WORDS = 16 };

typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location where; void *windows; uint8_t compression, rdma; uint16_t usage; int zero; } Properties;
typedef struct { Location where; int flags; } Access;
_Static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "as the driver lays them out");

static struct {
    int (*retain)(void **, int), (*push)(void *), (*pop)(void **);
    int (*host_alloc)(void **, size_t, unsigned), (*host_free)(void *);
    int (*granularity)(size_t *, const Properties *, int), (*create)(uint64_t *, size_t, const Properties *, uint64_t);
    int (*release)(uint64_t), (*reserve)(uintptr_t *, size_t, size_t, uintptr_t, uint64_t);
    int (*unreserve)(uintptr_t, size_t), (*map)(uintptr_t, size_t, size_t, uint64_t, uint64_t);
    int (*unmap)(uintptr_t, size_t), (*access)(uintptr_t, size_t, const Access *, size_t);
} cuda;

typedef struct { uintptr_t at; size_t asked, whole; int mechanism; } Block;
static Block *blocks; /* sorted by address */
static size_t block_count, block_room;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t limit, floor_left, held, peak, allocations, refused, unbound;
static int mechanism, node, last_error, last_reason, loaded;
static pid_t owner;

static int load(void) {
    if (loaded) return 1;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = library ? (int (*)(unsigned))dlsym(library, "cuInit") : NULL;
    if (!init || init(0)) return 0;
    const struct { void *to; const char *name; } wanted[] = {
        {&cuda.retain, "cuDevicePrimaryCtxRetain"}, {&cuda.push, "cuCtxPushCurrent_v2"}, {&cuda.pop, "cuCtxPopCurrent_v2"},
        {&cuda.host_alloc, "cuMemHostAlloc"}, {&cuda.host_free, "cuMemFreeHost"},
        {&cuda.granularity, "cuMemGetAllocationGranularity"}, {&cuda.create, "cuMemCreate"}, {&cuda.release, "cuMemRelease"},
        {&cuda.reserve, "cuMemAddressReserve"}, {&cuda.unreserve, "cuMemAddressFree"}, {&cuda.map, "cuMemMap"},
        {&cuda.unmap, "cuMemUnmap"}, {&cuda.access, "cuMemSetAccess"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!(*(void **)wanted[i].to = dlsym(library, wanted[i].name))) return 0;
    return loaded = 1;
}

static int enter(int device) {
    void *context;
    return !cuda.retain(&context, device) && !cuda.push(context);
}
static void leave(void) { void *context; cuda.pop(&context); }

/* -- which blocks there are -------------------------------------------------------------------------------- */

static size_t position(uintptr_t at) { /* of the first block that starts behind it */
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].at <= at) low = middle + 1; else high = middle;
    }
    return low;
}
static Block *find(uintptr_t at) {
    size_t behind = position(at);
    Block *block = behind ? &blocks[behind - 1] : NULL;
    return block && at < block->at + block->whole ? block : NULL;
}
static int room_for_one(void) {
    if (block_count < block_room) return 1;
    size_t wider = block_room ? block_room * 2 : 64;
    Block *moved = realloc(blocks, wider * sizeof *blocks);
    if (!moved) return 0;
    blocks = moved, block_room = wider;
    return 1;
}
static void remember(Block block) {
    size_t at = position(block.at);
    for (size_t i = block_count++; i > at; i--) blocks[i] = blocks[i - 1];
    blocks[at] = block;
}
static void forget(Block *block) {
    for (size_t i = (size_t)(block - blocks); i + 1 < block_count; i++) blocks[i] = blocks[i + 1];
    block_count--;
}

/* -- the mechanisms: 0 and a block, or the driver's error ------------------------------------------------------ */

static int host_take(Block *block) {
    unsigned long before[NODE_WORDS] = {0}, wanted[NODE_WORDS] = {0};
    int mode = MPOL_DEFAULT_, bound = 0;
    void *at = NULL;
    if (node >= 0 && node < NODE_WORDS * 64) {
        wanted[node / 64] = 1ul << node % 64;
        /* The kernel reads maxnode - 1 bits. A container may refuse both calls; memory on another node is memory, too. */
        bound = !syscall(SYS_get_mempolicy, &mode, before, NODE_WORDS * 64ul, NULL, 0ul)
                && !syscall(SYS_set_mempolicy, MPOL_BIND_, wanted, NODE_WORDS * 64ul + 1);
        unbound += !bound;
    }
    int code = cuda.host_alloc(&at, block->asked, PORTABLE_AND_MAPPED);
    if (bound) syscall(SYS_set_mempolicy, mode, mode == MPOL_DEFAULT_ ? NULL : before, mode == MPOL_DEFAULT_ ? 0 : NODE_WORDS * 64ul + 1);
    block->at = (uintptr_t)at, block->whole = block->asked;
    return code;
}

static int vmm_take(Block *block, int device) {
    Properties wanted = {.type = PINNED, .where = {AT_HOST_NUMA, node < 0 ? 0 : node}};
    Properties on_device = {.type = PINNED, .where = {AT_DEVICE, device}};
    Access access = {{AT_DEVICE, device}, READ_WRITE};
    size_t unit = 0, other = 0;
    uint64_t handle;
    int code = cuda.granularity(&unit, &wanted, 0);
    if (!code) code = cuda.granularity(&other, &on_device, 0);
    if (code) return code;
    if (other > unit) unit = other;
    block->whole = (block->asked + unit - 1) / unit * unit;
    if ((code = cuda.create(&handle, block->whole, &wanted, 0))) return code;
    if ((code = cuda.reserve(&block->at, block->whole, unit, 0, 0))) { cuda.release(handle); return code; }
    code = cuda.map(block->at, block->whole, 0, handle, 0);
    cuda.release(handle); /* the mapping keeps it */
    if (!code && (code = cuda.access(block->at, block->whole, &access, 1))) cuda.unmap(block->at, block->whole);
    if (code) cuda.unreserve(block->at, block->whole);
    return code;
}

static int give_back(const Block *block) {
    if (block->mechanism == HOST) return cuda.host_free((void *)block->at);
    int code = cuda.unmap(block->at, block->whole);
    return code ? code : cuda.unreserve(block->at, block->whole);
}

static unsigned long long bytes_in(const char *path, const char *key) { /* of a meminfo file; 0 where it does not tell */
    unsigned long long kib = 0;
    char line[160];
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    for (const char *found; fgets(line, sizeof line, file);)
        if ((found = strstr(line, key)) && sscanf(found + strlen(key), "%llu", &kib) == 1) break;
    fclose(file);
    return kib * 1024;
}

/* What is pinned can't be paged out: the last of the host's memory is never taken, whoever took the rest meanwhile. Nor
 * that of the node it is bound to, for want of which the kernel would kill, too. */
static int host_can_give(size_t size) {
    if (!floor_left) return 1; /* a trial, which asks the driver itself */
    unsigned long long left = bytes_in("/proc/meminfo", "MemAvailable:");
    if (left && left < size + floor_left) return 0;
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/meminfo", node);
    unsigned long long cached = bytes_in(path, "FilePages:"), shared = bytes_in(path, "Shmem:");
    unsigned long long on_node = node < 0 ? 0 : bytes_in(path, "MemFree:") + (cached > shared ? cached - shared : 0);
    return !on_node || on_node >= size + floor_left / 4;
}

/* -- what torch and Python call ---------------------------------------------------------------------------- */

/* 1 when the pool can work; 0 when there is no usable driver. Counters go on, whatever is configured. */
int gh200_pool_configure(int wanted, uint64_t most, uint64_t left, int host_node) {
    pthread_mutex_lock(&lock);
    int usable = load();
    mechanism = wanted, limit = most, floor_left = left, node = host_node;
    if (!owner) owner = getpid();
    pthread_mutex_unlock(&lock);
    return usable;
}

void *gh200_pool_alloc(ssize_t size, int device, void *stream) {
    (void)stream;
    Block block = {.asked = (size_t)size, .mechanism = mechanism};
    if (size <= 0) return NULL;
    pthread_mutex_lock(&lock);
    int reason = 0;
    /* A forked child must not touch the parent's CUDA state. */
    if (owner != getpid() || !loaded) reason = REFUSED_DRIVER;
    else if (held + (uint64_t)size > limit) reason = REFUSED_LIMIT;
    else if (!room_for_one() || !host_can_give((size_t)size)) reason = REFUSED_HOST;
    else if (!enter(device)) reason = REFUSED_DRIVER;
    else {
        last_error = mechanism == HOST ? host_take(&block) : vmm_take(&block, device);
        if (last_error) reason = REFUSED_DRIVER;
        leave();
    }
    if (!reason) {
        remember(block);
        held += block.whole, allocations++;
        if (held > peak) peak = held;
    } else refused++, last_reason = reason;
    pthread_mutex_unlock(&lock);
    return reason ? NULL : (void *)block.at;
}

void gh200_pool_free(void *at, ssize_t size, int device, void *stream) {
    (void)stream, (void)size;
    if (!at) return;
    pthread_mutex_lock(&lock);
    Block *block = owner == getpid() ? find((uintptr_t)at) : NULL;
    if (block && block->at == (uintptr_t)at && enter(device)) {
        last_error = give_back(block);
        if (!last_error) { held -= block->whole; forget(block); }
        leave();
    }
    pthread_mutex_unlock(&lock);
}

/* The mechanism of the block that an address is in; 0 where it is none of ours. */
int gh200_pool_home(uintptr_t at) {
    pthread_mutex_lock(&lock);
    Block *block = find(at);
    int found = block ? block->mechanism : 0;
    pthread_mutex_unlock(&lock);
    return found;
}

/* held, peak, limit, allocations, refused, unbound, last error, reason of the last refusal */
void gh200_pool_read(uint64_t out[8]) {
    pthread_mutex_lock(&lock);
    out[0] = held, out[1] = peak, out[2] = limit, out[3] = allocations, out[4] = refused, out[5] = unbound;
    out[6] = (uint64_t)last_error, out[7] = (uint64_t)last_reason;
    pthread_mutex_unlock(&lock);
}
