/* Machine, pages and allocations of the emulated driver. Caller holds emu_lock unless said otherwise. */
#define _GNU_SOURCE
#include "model.h"
#include "vmm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t emu_lock = PTHREAD_MUTEX_INITIALIZER;
unsigned long emu_faults, emu_migrations, emu_evictions, emu_prefetches, emu_copies;
size_t emu_hbm;

static const Personality machines[] = {
    /* A page is this machine's, whatever the personality: the kernel underneath is real. */
    /* name     label                    man con pag tab dir reg int numa id hostnode page  vmm refused crashes link vmm stays */
    {"gh200", "Emulated GH200 96GB", 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 4096, 1, 0, 0, 340e9, 330e9, 0},
    {"cdmm", "Emulated GH200 96GB CDMM", 1, 1, 1, 1, 1, 1, 0, 0, -1, 0, 4096, 1, 0, 0, 340e9, 330e9, 1},
    {"gb10", "Emulated GB10", 1, 1, 1, 1, 0, 1, 1, 0, -1, 0, 4096, 1, 0, 0, 200e9, 200e9, 0},
    {"pcie", "Emulated PCIe 80GB", 1, 1, 0, 0, 0, 1, 0, 0, -1, 0, 4096, 1, 0, 0, 50e9, 50e9, 0},
    {"hmm", "Emulated PCIe 80GB on x86 with HMM", 1, 1, 1, 0, 0, 1, 0, 0, -1, 0, 4096, 1, 0, 0, 50e9, 50e9, 0},
    {"legacy", "Emulated without concurrent access", 1, 0, 0, 0, 0, 1, 0, 0, -1, 0, 4096, 0, 0, 0, 12e9, 12e9, 0},
    /* Troubles with the virtual memory calls that others have met. */
    {"node-refused", "Emulated GH200 that refuses its node", 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 4096, 1, 1, 0, 340e9, 330e9, 0},
    {"slow-vmm", "Emulated GH200 with slow mappings", 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 4096, 1, 0, 0, 340e9, 1.5e9, 0},
    {"fast-vmm", "Emulated GH200 with fast mappings", 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 4096, 1, 0, 0, 200e9, 330e9, 0},
    {"crashing-vmm", "Emulated GH200 that crashes", 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 4096, 1, 0, 1, 340e9, 330e9, 0},
};
const Personality *emu_machine = &machines[0];

/* -- failures, counters, fork ------------------------------------------------------------------------------ */

typedef struct { char call[48]; int nth, code, seen; } Failure;
static Failure failures[32];
static int failure_count;
typedef struct { char call[48]; unsigned long count; } CallCount;
static CallCount counts[96];
static int count_used;
static pid_t owner;
static int ready;

static unsigned long *counter(const char *call) {
    for (int i = 0; i < count_used; i++)
        if (!strcmp(counts[i].call, call)) return &counts[i].count;
    if (count_used == 96) abort();
    snprintf(counts[count_used].call, sizeof counts[0].call, "%s", call);
    return &counts[count_used++].count;
}

int emu_enter(const char *call) {
    if (owner && owner != getpid()) {
        dprintf(2, "emulated driver: %s was called in a forked child\n", call);
        _exit(97);
    }
    owner = getpid();
    (*counter(call))++;
    for (int i = 0; i < failure_count; i++)
        if (!strcmp(failures[i].call, call) && ++failures[i].seen == failures[i].nth) return failures[i].code;
    return OK;
}

void emu_fail(const char *call, int nth, int code) { /* nth 0 clears all; not to be called under the lock */
    pthread_mutex_lock(&emu_lock);
    if (nth == 0) failure_count = 0;
    else if (failure_count < 32) {
        Failure *f = &failures[failure_count++];
        snprintf(f->call, sizeof f->call, "%s", call);
        f->nth = nth, f->code = code, f->seen = 0;
    }
    pthread_mutex_unlock(&emu_lock);
}

unsigned long emu_calls(const char *call) {
    pthread_mutex_lock(&emu_lock);
    unsigned long value = *counter(call);
    pthread_mutex_unlock(&emu_lock);
    return value;
}

unsigned long emu_counter(const char *name) {
    if (!strcmp(name, "faults")) return emu_faults;
    if (!strcmp(name, "migrations")) return emu_migrations;
    if (!strcmp(name, "evictions")) return emu_evictions;
    if (!strcmp(name, "prefetches")) return emu_prefetches;
    if (!strcmp(name, "copies")) return emu_copies;
    if (!strcmp(name, "hbm_used")) return hbm_used();
    if (!strcmp(name, "managed")) return alloc_count(MANAGED);
    if (!strcmp(name, "device")) return alloc_count(DEVICE);
    if (!strcmp(name, "pinned")) return alloc_count(PINNED_HOST);
    if (!strcmp(name, "mapped")) return alloc_count(MAPPED);
    if (!strcmp(name, "handles")) return vmm_handles();
    if (!strcmp(name, "ranges")) return vmm_ranges();
    if (!strcmp(name, "grace_used")) return grace_used();
    if (!strcmp(name, "registered")) return alloc_count(REGISTERED);
    return ~0ul;
}

int emu_become(const char *name) {
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++)
        if (!strcmp(machines[i].name, name)) { emu_machine = &machines[i]; return 1; }
    return 0;
}

int emu_lying; /* accept advice and prefetches, and record none */
void emu_lie(int yes) { emu_lying = yes; }

void emu_set_hbm(size_t bytes) { emu_hbm = bytes; }

static void failures_from(char *list) {
    for (char *save, *item = strtok_r(list, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        char call[48];
        int nth, code;
        if (sscanf(item, "%47[^:]:%d:%d", call, &nth, &code) == 3) emu_fail(call, nth, code);
    }
}

void emu_setup(void) { /* not under the lock */
    if (ready) return;
    ready = 1;
    const char *name = getenv("GH200_EMU_PERSONALITY"), *hbm = getenv("GH200_EMU_HBM"), *fail = getenv("GH200_EMU_FAIL");
    if (name && !emu_become(name)) { dprintf(2, "emulated driver: no personality %s\n", name); abort(); }
    emu_hbm = hbm ? strtoull(hbm, NULL, 10) : 64ul << 20;
    const char *grace = getenv("GH200_EMU_GRACE");
    if (grace) emu_grace = strtoull(grace, NULL, 10);
    if (fail) { char *list = strdup(fail); failures_from(list); free(list); }
}

/* -- allocations ------------------------------------------------------------------------------------------- */

static Allocation *table;
static size_t used, room;

Allocation *alloc_find(uintptr_t address, size_t size) {
    for (size_t i = 0; i < used; i++)
        if (address >= table[i].start && address + size <= table[i].start + table[i].size) return &table[i];
    return NULL;
}

int alloc_add(Kind kind, uintptr_t start, size_t size, int device) {
    if (used == room) {
        room = room ? room * 2 : 64;
        table = realloc(table, room * sizeof *table);
        if (!table) return OUT_OF_MEMORY;
    }
    table[used++] = (Allocation){kind, start, size, device};
    return OK;
}

void alloc_remove(Allocation *found) { *found = table[--used]; }

size_t alloc_count(Kind kind) {
    size_t n = 0;
    for (size_t i = 0; i < used; i++) n += table[i].kind == kind;
    return n;
}

/* -- pages: one hash table for managed and for advised system memory ------------------------------------------ */

#define SLOTS (1u << 18)
static Page *slots;
static size_t on_device_bytes;

Page *page_at(uintptr_t address, int create) {
    if (!slots) slots = calloc(SLOTS, sizeof *slots);
    uintptr_t number = address / emu_machine->page + 1;
    for (size_t i = (number * 11400714819323198485ull) >> 46, tried = 0; tried < SLOTS; i = (i + 1) % SLOTS, tried++) {
        if (slots[i].number == number) return &slots[i];
        if (!slots[i].number) {
            if (!create) return NULL;
            slots[i] = (Page){.number = number, .where = HOST, .preferred = NOWHERE, .last = NOWHERE};
            return &slots[i];
        }
    }
    abort();
}

static void set_where(Page *page, int where) {
    if (page->where >= 0) on_device_bytes -= emu_machine->page;
    page->where = (short)where;
    if (where >= 0) on_device_bytes += emu_machine->page;
}

void pages_forget(uintptr_t start, size_t size) {
    for (uintptr_t at = start - start % emu_machine->page; at < start + size; at += emu_machine->page) {
        Page *page = page_at(at, 0);
        if (!page) continue;
        set_where(page, HOST); /* the slot stays, so that probing chains do too */
        page->preferred = page->last = NOWHERE, page->mostly = 0, page->accessed = 0;
    }
}

/* System memory may be unmapped without our hearing of it: tests that reuse the process start with clean pages. */
void emu_forget(void) {
    pthread_mutex_lock(&emu_lock);
    if (slots) memset(slots, 0, SLOTS * sizeof *slots);
    on_device_bytes = 0;
    pthread_mutex_unlock(&emu_lock);
}

int pages_advisable(uintptr_t start, size_t size) {
    Allocation *found = alloc_find(start, size);
    if (found && found->kind == MANAGED) return 1;
    if (found && (found->kind == DEVICE || found->kind == MAPPED)) return 0;
    if (!emu_machine->pageable) return 0;
    unsigned char present[1];
    uintptr_t step = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (uintptr_t at = start - start % step; at < start + size; at += step)
        if (mincore((void *)at, step, present) != 0) return 0;
    return 1;
}

size_t pinned_bytes(void) {
    size_t bytes = 0;
    for (size_t i = 0; i < used; i++)
        if (table[i].kind == PINNED_HOST) bytes += table[i].size;
    return bytes;
}

/* How long a copy takes: by the slower of its two ends, writing to host memory a little slower than reading it. */
static double rate_at(uintptr_t address, int written) {
    Allocation *found = alloc_find(address, 1);
    if (found && found->kind == DEVICE) return 3e12;
    double rate = found && found->kind == MAPPED ? emu_machine->vmm_link : emu_machine->link;
    return written ? rate * 0.9 : rate;
}
double copy_seconds(uintptr_t to, uintptr_t from, size_t size) {
    double in = rate_at(from, 0), out = rate_at(to, 1);
    return (double)size / (in < out ? in : out);
}

size_t hbm_used(void) {
    size_t bytes = on_device_bytes;
    for (size_t i = 0; i < used; i++)
        if (table[i].kind == DEVICE) bytes += table[i].size;
    return bytes;
}

/* Evict pages outside the protected range until so many bytes fit: first those that do not prefer the device. */
int hbm_make_room(size_t bytes, uintptr_t from, uintptr_t to) {
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; slots && i < SLOTS && hbm_used() + bytes > emu_hbm; i++) {
            Page *page = &slots[i];
            uintptr_t at = (page->number - 1) * emu_machine->page;
            if (!page->number || page->where < 0 || (at >= from && at < to)) continue;
            if (pass == 0 && page->preferred >= 0) continue;
            set_where(page, HOST);
            emu_evictions++;
        }
    return hbm_used() + bytes <= emu_hbm;
}

/* Where a prefetch really goes: under CDMM system memory stays on the CPU, and the call succeeds all the same. */
int pages_target(uintptr_t start, size_t size, int where) {
    Allocation *found = alloc_find(start, size);
    int stays = emu_machine->system_prefetch_stays && where >= 0 && !(found && found->kind == MANAGED);
    return stays ? HOST : where;
}

int pages_move(uintptr_t start, size_t size, int target, int is_prefetch) {
    for (uintptr_t at = start - start % emu_machine->page; at < start + size; at += emu_machine->page) {
        Page *page = page_at(at, 1);
        if (page->where == target) continue;
        /* More than fits: what came first stays, the rest remains where it is, as on the real driver. */
        if (target >= 0 && page->where < 0 && !hbm_make_room(emu_machine->page, start, start + size)) continue;
        if (!is_prefetch) emu_faults++;
        set_where(page, target);
        emu_migrations++;
    }
    return OK;
}

int emu_residency(uintptr_t address) {
    pthread_mutex_lock(&emu_lock);
    Page *page = page_at(address, 0);
    int where = page ? page->where : HOST;
    pthread_mutex_unlock(&emu_lock);
    return where;
}

/* Somebody (a device from 0, or HOST) touches a range: pages fault over unless they prefer to stay where they are. */
void emu_touch(uintptr_t start, size_t size, int who) {
    pthread_mutex_lock(&emu_lock);
    for (uintptr_t at = start - start % emu_machine->page; at < start + size; at += emu_machine->page) {
        Page *page = page_at(at, 1);
        if (page->where == who || page->preferred == page->where) continue;
        pages_move(at, 1, who, 0);
    }
    pthread_mutex_unlock(&emu_lock);
}
