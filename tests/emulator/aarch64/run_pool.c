/* The pool allocator on the product's CPU: load the emulated driver, allocate, go over the limit, free. Prints "ok". */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

int gh200_pool_configure(int, uint64_t, uint64_t, int);
void *gh200_pool_alloc(ssize_t, int, void *);
void gh200_pool_free(void *, ssize_t, int, void *);
int gh200_pool_home(uintptr_t);
void gh200_pool_read(uint64_t[8]);

#define MIB (1 << 20)
#define EXPECT(what) \
    if (!(what)) return printf("failed: %s\n", #what), 1

int main(int count, char **words) {
    uint64_t now[8];
    EXPECT(count == 2);
    EXPECT(dlopen(words[1], RTLD_NOW | RTLD_GLOBAL));
    for (int mechanism = 1; mechanism <= 2; mechanism++) { /* host, vmm */
        EXPECT(gh200_pool_configure(mechanism, 3 * MIB, 0, 0));
        char *first = gh200_pool_alloc(2 * MIB, 0, NULL);
        EXPECT(first);
        memset(first, 7, 2 * MIB);
        EXPECT(gh200_pool_home((uintptr_t)first + 5) == mechanism);
        EXPECT(!gh200_pool_alloc(2 * MIB, 0, NULL));
        gh200_pool_read(now);
        EXPECT(now[0] == 2 * MIB && now[7] == 1);
        gh200_pool_free(first, 2 * MIB, 0, NULL);
        gh200_pool_read(now);
        EXPECT(now[0] == 0 && !gh200_pool_home((uintptr_t)first));
    }
    return puts("ok"), 0;
}
