/* A stand-in for libnvidia-ml.so.1 with the few calls that ours makes; steered by GH200_EMU_NVML:
   gh200 (default), gb10 (no memory of its own), old (no link counters), busy (memory in use), none (does not start). */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
#define GIB (1ull << 30)

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version, supported; } Support;
typedef struct { unsigned id, result; double value; char *names[3]; } Metric;
typedef struct { unsigned version, count; long *sample1, *sample2; Metric metrics[]; } Question;

static int is(const char *kind) {
    const char *set = getenv("GH200_EMU_NVML");
    return !strcmp(set ? set : "gh200", kind);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return is("none") ? DRIVER_NOT_LOADED : OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Driver Not Loaded"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    *out = (void *)(long)(index + 1);
    return index < 2 ? OK : NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **out) { (void)name; *out = (void *)1; return OK; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
    (void)device;
    if (is("gb10")) return NOT_SUPPORTED;
    out->total = 96 * GIB;
    out->used = is("busy") ? 60 * GIB : GIB;
    out->free = out->total - out->used;
    return OK;
}
int nvmlGpmQueryDeviceSupport(void *device, Support *out) {
    (void)device;
    out->supported = is("gh200");
    return is("gb10") ? NOT_SUPPORTED : OK;
}
static long taken;
int nvmlGpmSampleAlloc(long **out) { *out = calloc(1, sizeof **out); return OK; }
int nvmlGpmSampleFree(long *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *device, long *sample) { (void)device; *sample = ++taken; return OK; }
int nvmlGpmMetricsGet(Question *asked) {
    for (unsigned i = 0; i < asked->count; i++) /* MiB/s */
        asked->metrics[i].value = (double)(*asked->sample2 - *asked->sample1) * 100 * (i + 1);
    return OK;
}
