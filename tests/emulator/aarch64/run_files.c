/* Listing and reading a folder on the product's CPU: two files, for one of which there is no room. Prints "ok". */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct row {
    uint64_t status, plain, size, mtime_ns, ctime_ns, inode, content, content_size;
};

int gh200_list_folder(int, const char *, int, char *, size_t, char *, size_t *, uint64_t *);
void gh200_read_files(const char *, const char *, int, char *, size_t, int, struct row *);

#define EXPECT(what) \
    if (!(what)) return printf("failed: %s\n", #what), 1

int main(int count, char **words) {
    static char scratch[65536], names[65536], buffer[70];
    uint64_t sizes[3000];
    size_t used;
    struct row rows[3];
    EXPECT(count == 2 && chdir(words[1]) == 0);
    int one = open("one", O_CREAT | O_WRONLY, 0600), two = open("two", O_CREAT | O_WRONLY, 0600);
    EXPECT(write(one, "first", 5) == 5 && write(two, "second", 6) == 6);
    int folder = open(".", O_RDONLY | O_DIRECTORY);
    EXPECT(gh200_list_folder(folder, "", 1, scratch, sizeof scratch, names, &used, sizes) == 2);
    EXPECT(used == 8 && sizes[0] + sizes[1] == 11);
    EXPECT(gh200_list_folder(folder, "", 1, scratch, sizeof scratch, names, &used, sizes) == 0);
    gh200_read_files(".", "one\0gone\0two", 3, buffer, sizeof buffer, 1, rows);
    EXPECT(rows[0].status == 0 && rows[1].status == 4 && rows[0].content_size == 5 && !memcmp(buffer, "first", 5));
    EXPECT(rows[2].status == 6); /* there was room for it, and not for the byte that would show that it grew */
    return puts("ok"), 0;
}
