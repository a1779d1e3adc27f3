/* Listing and reading a folder on the product's CPU: two files, one of which has grown since it was listed. Prints "ok". */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int gh200_list_folder(int, char *, size_t, char *, size_t *, uint64_t *);
void gh200_read_files(const char *, const char *, int, const uint64_t *, char *, size_t, int, unsigned char *);

#define EXPECT(what) \
    if (!(what)) return printf("failed: %s\n", #what), 1

int main(int count, char **words) {
    static char scratch[65536], names[65536], buffer[64];
    uint64_t sizes[3000];
    size_t used;
    unsigned char read[2];
    EXPECT(count == 2 && chdir(words[1]) == 0);
    int one = open("one", O_CREAT | O_WRONLY, 0600), two = open("two", O_CREAT | O_WRONLY, 0600);
    EXPECT(write(one, "first", 5) == 5 && write(two, "second", 6) == 6);
    int folder = open(".", O_RDONLY | O_DIRECTORY);
    EXPECT(gh200_list_folder(folder, scratch, sizeof scratch, names, &used, sizes) == 2);
    EXPECT(used == 8 && sizes[0] + sizes[1] == 11);
    EXPECT(gh200_list_folder(folder, scratch, sizeof scratch, names, &used, sizes) == 0);
    uint64_t expected[] = {4, 6};
    gh200_read_files(".", "one\0two", 2, expected, buffer, sizeof buffer, 1, read);
    EXPECT(read[0] == 0 && read[1] == 2 && !memcmp(buffer, "second", 6)); /* 2: written a moment ago */
    return puts("ok"), 0;
}
