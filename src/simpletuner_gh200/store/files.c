/* What staging asks of the file system, many files at a time.
 *
 * From Python every system call gives the interpreter lock away and takes it back; with two threads at work that
 * costs more than the calls. Here a whole batch passes between giving and taking. Only the usual case is handled:
 * whatever is not a plain file that holds still is marked, and Python looks at it with all the care it needs.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define OTHER UINT64_MAX /* not a plain file, or not to be asked */
#define ASK_EVERY 16
#define RECENT_SECONDS 1 /* as file_reader.RECENT_NS */

struct record { /* as getdents64(2) describes it; the C library does not declare it */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* The next entries of an open folder: their names, each with its zero, into names; their sizes, or OTHER, into sizes.
 * Both must have room for what scratch can hold. Returns how many; 0 at the end, -errno where the folder can't be
 * read. */
int gh200_list_folder(int folder, char *scratch, size_t room, char *names, size_t *used, uint64_t *sizes) {
    int count = 0;
    *used = 0;
    while (count == 0) {
        long filled;
        do filled = syscall(SYS_getdents64, folder, scratch, room);
        while (filled < 0 && errno == EINTR);
        if (filled <= 0) return filled < 0 ? -errno : 0;
        for (long at = 0; at < filled;) {
            struct record *entry = (struct record *)(scratch + at);
            at += entry->length;
            if (!strcmp(entry->name, ".") || !strcmp(entry->name, "..")) continue;
            struct stat found;
            int plain = (entry->type == DT_REG || entry->type == DT_UNKNOWN) &&
                        fstatat(folder, entry->name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode);
            size_t length = strlen(entry->name) + 1;
            memcpy(names + *used, entry->name, length);
            *used += length;
            sizes[count++] = plain ? (uint64_t)found.st_size : OTHER;
        }
    }
    return count;
}

/* Has the file to come from the disk? No where its file system can't tell, as most network ones can't. */
static int is_cold(int file) {
    char byte;
    struct iovec one = {&byte, 1};
    return preadv2(file, &one, 1, 0, RWF_NOWAIT) < 0 && errno == EAGAIN;
}

static void fetch_ahead(int folder, const char *names, int count) {
    for (int at = 0; at < count; at++, names += strlen(names) + 1) {
        int file = openat(folder, names, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file < 0) continue;
        posix_fadvise(file, 0, 0, POSIX_FADV_WILLNEED);
        close(file);
    }
}

static int same_time(struct timespec a, struct timespec b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

/* Is it the same file, unchanged? */
static int held_still(const struct stat *before, const struct stat *after) {
    return before->st_ino == after->st_ino && before->st_dev == after->st_dev && before->st_size == after->st_size &&
           same_time(before->st_mtim, after->st_mtim) && same_time(before->st_ctim, after->st_ctim);
}

/* Reads count files of one folder one behind the other into buffer. read[i] becomes 1 where file i had exactly the
 * expected size, held still and lies there, 2 where it was changed just before all the same, so that its times can't
 * tell whether it was read half changed, 0 where it has to be looked at; those take no room. Gives the page cache of
 * what was read back if asked to. */
void gh200_read_files(const char *path, const char *names, int count, const uint64_t *sizes, char *buffer, size_t room,
                      int give_back, unsigned char *read) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), fetched = 0;
    size_t used = 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(read, 0, (size_t)count);
    if (folder < 0) return;
    for (int at = 0; at < count; at++, names += strlen(names) + 1) {
        if (sizes[at] >= room - used) continue; /* one byte more than expected is asked for, so that growth shows */
        int file = openat(folder, names, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file < 0) continue;
        struct stat before, after;
        int regular = fstat(file, &before) == 0 && S_ISREG(before.st_mode);
        if (regular && !fetched && at % ASK_EVERY == 0 && is_cold(file)) {
            fetch_ahead(folder, names, count - at);
            fetched = 1;
        }
        ssize_t got = regular ? pread(file, buffer + used, sizes[at] + 1, 0) : -1;
        if (got >= 0 && (uint64_t)got == sizes[at] && fstatat(folder, names, &after, 0) == 0 &&
            held_still(&before, &after)) {
            time_t recent = now.tv_sec - RECENT_SECONDS;
            read[at] = before.st_mtim.tv_sec >= recent || before.st_ctim.tv_sec >= recent ? 2 : 1;
            used += (size_t)got;
            if (give_back) posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
        }
        close(file);
    }
    close(folder);
}
