/* Takes torch's files apart, many at a time: what filling a cache asks of the file system, of zip and gzip, and of
 * the index.
 *
 * From Python every call on the way from a file to a tensor gives the interpreter lock away and takes it back; in a run,
 * where others want it too, that costs more than the calls. Here a whole batch passes between giving and taking.
 * Only the usual case is handled: a zip of stored members as torch writes it, gzipped or not, whose pickle is known.
 * Whatever is anything else is marked, and Python looks at it with all the care it needs. Nothing is taken from a file
 * whose checksums don't fit, or that changed while it was read.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "inflate.h"

enum { TAKEN, UNKNOWN, OTHER, DAMAGED, GONE, CHANGED, NO_ROOM, REFUSED };

#define MOST_STORAGES 64

struct leaf { /* a tensor's bytes: where in which storage, where in the payload, and what a number in it looks like */
    uint64_t storage, from, size, at;
    uint64_t word, exponent; /* bytes per number, and the bits that are all set in NaN and infinity; 0: none can be */
};

struct shape { /* a pickle that was understood */
    const unsigned char *pickle;
    uint64_t pickle_size;
    const struct leaf *leaves;
    uint64_t leaf_count;
    const uint64_t *storage_sizes;
    uint64_t storage_count;
    uint64_t payload_size;
    uint64_t refused; /* it is understood that this can't be held */
};

struct file {
    uint64_t status, shape;
    uint64_t size, mtime_ns, ctime_ns, inode, ordinary; /* how it looked, before and after */
    uint64_t content, content_size;                     /* in the buffer: all of it, inflated */
    uint64_t pickle, pickle_size;
    uint64_t storages[MOST_STORAGES]; /* where each begins in the buffer */
    uint64_t finite;
};

struct member {
    const unsigned char *name;
    size_t name_size, at, size;
};

static uint64_t number(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

/* -- gzip ------------------------------------------------------------------------------------------------------- */

static int is_gzip(const unsigned char *data, size_t size) { return size >= 18 && data[0] == 0x1f && data[1] == 0x8b; }

/* Where the compressed bytes begin; 0 where the header is none that we know. */
static size_t gzip_body(const unsigned char *data, size_t size) {
    unsigned flags = data[3];
    size_t at = 10;
    if (data[2] != 8 || flags & 0xE0) return 0;
    if (flags & 4) at += 2 + number(data + 10, 2);
    for (int text = 0; text < 2; text++)
        if (flags & (text ? 16 : 8)) {
            while (at < size && data[at]) at++;
            at++;
        }
    if (flags & 2) at += 2;
    return at + 8 < size ? at : 0;
}

/* Status of unpacking one whole gzip file into out; *made is how large it came out. */
static int gunzip(const unsigned char *data, size_t size, unsigned char *out, size_t room, size_t *made) {
    size_t body = gzip_body(data, size), used = 0;
    uint64_t expected = number(data + size - 4, 4);
    if (!body) return OTHER;
    if (expected > room) return NO_ROOM;
    int64_t got = inflate_raw(data + body, size - body - 8, out, expected, &used);
    if (got < 0 || (uint64_t)got != expected || body + used + 8 != size) return DAMAGED; /* or several in one: rare */
    if (crc32_of(out, expected) != number(data + size - 8, 4)) return DAMAGED;
    *made = expected;
    return TAKEN;
}

/* -- zip -------------------------------------------------------------------------------------------------------- */

/* Where the directory is, and of how many members. 0 where this is no zip, or one with a comment, or in parts. */
static int find_directory(const unsigned char *data, size_t size, size_t *at, size_t *bytes, size_t *count) {
    if (size < 22 || number(data + size - 22, 4) != 0x06054b50) return 0;
    const unsigned char *end = data + size - 22;
    *count = number(end + 10, 2), *bytes = number(end + 12, 4), *at = number(end + 16, 4);
    size_t after = size - 22;
    if (size >= 98 && number(end - 20, 4) == 0x07064b50) {
        uint64_t place = number(end - 12, 8);
        if (place > size - 98 || number(data + place, 4) != 0x06064b50) return 0;
        *count = number(data + place + 32, 8), *bytes = number(data + place + 40, 8), *at = number(data + place + 48, 8);
        after = place;
    }
    return *at <= after && *bytes == after - *at && *count <= *bytes / 46;
}

/* The value of a field that may be in the extra part, in the order in which those that are stand there. */
static int widen(uint64_t *value, const unsigned char **extra, const unsigned char *end) {
    if (*value != 0xFFFFFFFF) return 1;
    if (end - *extra < 8) return 0;
    *value = number(*extra, 8);
    *extra += 8;
    return 1;
}

/* The member that a directory entry names; OTHER or DAMAGED where it is not as torch writes it. *next: its end. */
static int read_member(const unsigned char *data, size_t directory, size_t limit, size_t *next, struct member *member) {
    const unsigned char *entry = data + *next;
    if (limit - *next < 46 || number(entry, 4) != 0x02014b50) return DAMAGED;
    size_t name_size = number(entry + 28, 2), extra_size = number(entry + 30, 2), comment = number(entry + 32, 2);
    if (limit - *next < 46 + name_size + extra_size + comment) return DAMAGED;
    *next += 46 + name_size + extra_size + comment;
    uint64_t packed = number(entry + 20, 4), size = number(entry + 24, 4), place = number(entry + 42, 4);
    const unsigned char *extra = entry + 46 + name_size, *end = extra + extra_size, *wide = end;
    while (end - extra >= 4) {
        size_t length = number(extra + 2, 2);
        if (length > (size_t)(end - extra) - 4) return DAMAGED;
        if (number(extra, 2) == 1) wide = extra + 4, end = wide + length;
        extra += 4 + length;
    }
    if (!widen(&size, &wide, end) || !widen(&packed, &wide, end) || !widen(&place, &wide, end)) return DAMAGED;
    if (number(entry + 10, 2) != 0 || packed != size || number(entry + 8, 2) & 1) return OTHER;
    if (place > directory || directory - place < 30 || number(data + place, 4) != 0x04034b50) return DAMAGED;
    size_t local_name = number(data + place + 26, 2), local_extra = number(data + place + 28, 2);
    size_t at = place + 30 + local_name + local_extra;
    if (local_name != name_size || at > directory || directory - at < size) return DAMAGED;
    if (memcmp(data + place + 30, entry + 46, name_size)) return DAMAGED;
    if (crc32_of(data + at, size) != number(entry + 16, 4)) return DAMAGED;
    *member = (struct member){entry + 46, name_size, at, size};
    return TAKEN;
}

static int named(const struct member *member, size_t root, const char *name) {
    size_t length = strlen(name);
    return member->name_size - root == length && !memcmp(member->name + root, name, length);
}

/* The number of a storage, -1 for any other member. */
static long storage_number(const struct member *member, size_t root) {
    size_t digits = member->name_size - root - 5;
    if (member->name_size - root < 6 || digits > 3 || memcmp(member->name + root, "data/", 5)) return -1;
    const unsigned char *digit = member->name + root + 5;
    if (digits > 1 && *digit == '0') return -1;
    long value = 0;
    for (size_t at = 0; at < digits; at++) {
        if (digit[at] < '0' || digit[at] > '9') return -1;
        value = value * 10 + digit[at] - '0';
    }
    return value;
}

static int known_besides(const unsigned char *data, const struct member *member, size_t root) {
    if (named(member, root, "byteorder")) return member->size == 6 && !memcmp(data + member->at, "little", 6);
    if (named(member, root, "version")) return member->size >= 1 && data[member->at] == '3';
    return named(member, root, ".format_version") || named(member, root, ".storage_alignment") ||
           named(member, root, ".data/serialization_id");
}

/* Finds the pickle and the storages of one file in memory, all checksums checked. sizes: of the storages. */
static int open_zip(const unsigned char *data, size_t size, struct file *file, uint64_t *sizes) {
    size_t directory, bytes, count, root = 0;
    const unsigned char *root_name = NULL;
    if (!find_directory(data, size, &directory, &bytes, &count)) return OTHER;
    memset(sizes, 0xFF, MOST_STORAGES * sizeof *sizes);
    file->pickle_size = 0;
    size_t next = directory, limit = directory + bytes;
    for (size_t at = 0; at < count; at++) {
        struct member member;
        int status = read_member(data, directory, limit, &next, &member);
        if (status != TAKEN) return status;
        if (!root_name) {
            const unsigned char *slash = memchr(member.name, '/', member.name_size);
            if (!slash) return OTHER;
            root = (size_t)(slash - member.name) + 1, root_name = member.name;
        }
        if (member.name_size < root || memcmp(member.name, root_name, root)) return OTHER;
        long storage = storage_number(&member, root);
        if (storage >= MOST_STORAGES) return OTHER;
        if (storage >= 0) {
            if (sizes[storage] != UINT64_MAX) return OTHER;
            file->storages[storage] = member.at, sizes[storage] = member.size;
        } else if (named(&member, root, "data.pkl")) {
            if (file->pickle_size || !member.size) return OTHER;
            file->pickle = member.at, file->pickle_size = member.size;
        } else if (!known_besides(data, &member, root)) return OTHER;
    }
    if (next != limit) return DAMAGED;
    return file->pickle_size ? TAKEN : OTHER;
}

/* -- what is in it ---------------------------------------------------------------------------------------------- */

#define LOOKED_AT_ONCE 4096

/* Made for several processors, of which the loader chooses, where it can. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MANY_AT_ONCE __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define MANY_AT_ONCE
#endif

/* Adding one to exponent bits that are all set carries into the sign bit, which they never reach otherwise. Done on
 * eight bytes at a time, whatever the size of a number: nothing carries from one into the next. */
MANY_AT_ONCE static uint64_t carries(const unsigned char *data, size_t words, uint64_t mask, uint64_t one) {
    uint64_t found = 0, word;
    for (size_t at = 0; at < words; at++) {
        memcpy(&word, data + 8 * at, 8);
        found |= (word & mask) + one;
    }
    return found;
}

static int is_finite(const unsigned char *data, const struct leaf *leaf) {
    if (!leaf->exponent) return leaf->word != 0; /* whole numbers are; what can't be asked counts as not finite */
    uint64_t mask = 0, one = 0, last = 0;
    for (uint64_t at = 0; at < 8; at += leaf->word) {
        mask |= leaf->exponent << 8 * at;
        one |= (leaf->exponent & -leaf->exponent) << 8 * at;
    }
    uint64_t sign = mask + one;
    size_t size = leaf->size;
    for (size_t at = 0; at + 8 <= size; at += LOOKED_AT_ONCE) {
        size_t some = size - at < LOOKED_AT_ONCE ? size - at : LOOKED_AT_ONCE;
        if (carries(data + at, some / 8, mask, one) & sign) return 0;
    }
    memcpy(&last, data + size / 8 * 8, size % 8);
    return !(carries((unsigned char *)&last, 1, mask, one) & sign);
}

static int fits(const struct shape *shape, const uint64_t *sizes) {
    for (uint64_t at = 0; at < MOST_STORAGES; at++)
        if (sizes[at] != (at < shape->storage_count ? shape->storage_sizes[at] : UINT64_MAX)) return 0;
    return 1;
}

static int recognise(const unsigned char *data, struct file *file, const uint64_t *sizes, const struct shape *shapes,
                     uint64_t count, int look_for_nan) {
    for (uint64_t at = 0; at < count; at++) {
        const struct shape *shape = shapes + at;
        if (shape->pickle_size != file->pickle_size || memcmp(data + file->pickle, shape->pickle, shape->pickle_size)) continue;
        if (!fits(shape, sizes)) return OTHER;
        file->shape = at;
        if (shape->refused) return REFUSED;
        file->finite = (uint64_t)look_for_nan;
        for (uint64_t leaf = 0; leaf < shape->leaf_count && file->finite; leaf++) {
            const struct leaf *one = shape->leaves + leaf;
            file->finite = (uint64_t)is_finite(data + file->storages[one->storage] + one->from, one);
        }
        return TAKEN;
    }
    return UNKNOWN;
}

/* -- files ------------------------------------------------------------------------------------------------------ */

static void note(struct file *file, const struct stat *found) {
    file->size = (uint64_t)found->st_size, file->inode = found->st_ino;
    file->mtime_ns = (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec;
    file->ctime_ns = (uint64_t)found->st_ctim.tv_sec * 1000000000u + (uint64_t)found->st_ctim.tv_nsec;
}

static int same(const struct file *file, const struct stat *found) {
    struct file now;
    note(&now, found);
    return now.size == file->size && now.inode == file->inode && now.mtime_ns == file->mtime_ns && now.ctime_ns == file->ctime_ns;
}

static int read_all(int fd, unsigned char *to, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(fd, to + done, size - done, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        done += (size_t)got;
    }
    return 1;
}

/* Reads one file to the end of what the buffer holds. A gzipped one goes through scratch. */
static int read_one(const char *path, unsigned char *buffer, size_t used, size_t room, unsigned char *scratch,
                    size_t scratch_room, struct file *file) {
    struct stat found, link;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? GONE : OTHER;
    int status = OTHER;
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode)) {
        note(file, &found);
        file->ordinary = lstat(path, &link) == 0 && S_ISREG(link.st_mode) && link.st_nlink == 1;
        unsigned char start[2] = {0, 0}, *out = buffer + used;
        size_t size = file->size, left = room - used;
        if (size < 2 || pread(fd, start, 2, 0) != 2) status = OTHER;
        else if (start[0] == 'P' && start[1] == 'K') {
            file->content_size = size;
            status = size > left ? NO_ROOM : read_all(fd, out, size) ? TAKEN : OTHER;
        } else if (start[0] == 0x1f && start[1] == 0x8b && size <= scratch_room) {
            size_t made = 0;
            status = !read_all(fd, scratch, size) || !is_gzip(scratch, size) ? OTHER : gunzip(scratch, size, out, left, &made);
            file->content_size = made;
        }
        if (fstat(fd, &found) != 0 || !same(file, &found)) status = CHANGED;
    }
    close(fd);
    return status;
}

/* Reads and takes apart files one after the other until the buffer is full; each with its status. paths: each with its
 * zero. Returns how many were looked at: those from the first NO_ROOM on were not, unless that is the very first.
 */
int gh200_take_files(const char *paths, int count, unsigned char *buffer, size_t room, unsigned char *scratch,
                     size_t scratch_room, const struct shape *shapes, uint64_t shape_count, int look_for_nan,
                     struct file *files) {
    size_t used = 0;
    for (int at = 0; at < count; at++, paths += strlen(paths) + 1) {
        struct file *file = files + at;
        memset(file, 0, offsetof(struct file, storages));
        file->finite = 0;
        file->content = used;
        file->status = (uint64_t)read_one(paths, buffer, used, room, scratch, scratch_room, file);
        if (file->status == NO_ROOM && at) return at;
        if (file->status != TAKEN) continue;
        uint64_t sizes[MOST_STORAGES];
        int status = open_zip(buffer + used, file->content_size, file, sizes);
        if (status == TAKEN) status = recognise(buffer + used, file, sizes, shapes, shape_count, look_for_nan);
        file->status = (uint64_t)status;
        /* What is taken stays in the buffer until it is written out; so does a pickle that is to be learned. */
        if (status == TAKEN || status == UNKNOWN) used += (file->content_size + 63) / 64 * 64;
        if (used > room) used = room;
    }
    return count;
}

/* Writes the payloads of taken files: through the descriptor where there is one, since pages that are written whole
 * needn't be cleared first, else to memory. Returns 0, or the error. */
int gh200_put_payloads(const unsigned char *buffer, const struct shape *shapes, const struct file *files,
                       const uint32_t *which, const uint64_t *offsets, int count, int fd, unsigned char *memory) {
    for (int at = 0; at < count; at++) {
        const struct file *file = files + which[at];
        const struct shape *shape = shapes + file->shape;
        for (uint64_t leaf = 0; leaf < shape->leaf_count; leaf++) {
            const struct leaf *one = shape->leaves + leaf;
            const unsigned char *from = buffer + file->content + file->storages[one->storage] + one->from;
            uint64_t to = offsets[at] + one->at, left = one->size;
            if (fd < 0) {
                memcpy(memory + to, from, left);
                continue;
            }
            while (left) {
                ssize_t put = pwrite(fd, from, left, (off_t)to);
                if (put < 0 && errno == EINTR) continue;
                if (put <= 0) return put ? errno : EIO;
                from += put, to += (uint64_t)put, left -= (uint64_t)put;
            }
        }
    }
    return 0;
}

/* -- which files there are -------------------------------------------------------------------------------------- */

struct record { /* as getdents64(2) describes it; the C library does not declare it */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* The next entries of an open folder that end with suffix and are plain files: names, each with its zero, and sizes.
 * Whatever else there is goes to others, likewise. Each has room for all that scratch can hold. counts: of names, of
 * others, and how many bytes these two take. Returns 1, 0 at the end, -errno where the folder can't be read. */
int gh200_list_tensors(int folder, const char *suffix, char *scratch, size_t room, char *names, uint64_t *sizes,
                       char *others, uint64_t *counts) {
    size_t ending = strlen(suffix);
    memset(counts, 0, 4 * sizeof *counts);
    long filled;
    do filled = syscall(SYS_getdents64, folder, scratch, room);
    while (filled < 0 && errno == EINTR);
    if (filled <= 0) return filled < 0 ? -errno : 0;
    for (long at = 0; at < filled;) {
        struct record *entry = (struct record *)(scratch + at);
        at += entry->length;
        if (!strcmp(entry->name, ".") || !strcmp(entry->name, "..")) continue;
        size_t length = strlen(entry->name);
        int wanted = length >= ending && !memcmp(entry->name + length - ending, suffix, ending);
        struct stat found;
        if (entry->type == DT_REG && !wanted) continue;
        if (entry->type == DT_REG && fstatat(folder, entry->name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode)) {
            memcpy(names + counts[2], entry->name, length + 1);
            sizes[counts[0]++] = (uint64_t)found.st_size, counts[2] += length + 1;
        } else {
            memcpy(others + counts[3], entry->name, length + 1);
            counts[1]++, counts[3] += length + 1;
        }
    }
    return 1;
}

/* -- the index -------------------------------------------------------------------------------------------------- */

#define SLOT_WORDS 8
#define SEAL UINT64_C(0x9E3779B97F4A7C15)

/* Publishes entries in the table of slots.py, whose lock the caller holds, at most fresh of them under keys that are new
 * to it. rows: seven words each, key first. done[i] becomes 1 where entry i is published, 0 where something is published
 * under its key already, or the table is full: those are left alone. Returns how many keys were new. */
int gh200_enter_slots(uint64_t *words, uint64_t slots, const uint64_t *rows, int count, uint64_t fresh, unsigned char *done) {
    int added = 0;
    for (int at = 0; at < count; at++, rows += 7) {
        uint64_t index = rows[0] & (slots - 1), check = SEAL, tried = 0;
        uint64_t *slot = words + index * SLOT_WORDS;
        for (; slot[0] && (slot[0] != rows[0] || slot[1] != rows[1]) && tried < slots; tried++) {
            index = (index + 1) & (slots - 1);
            slot = words + index * SLOT_WORDS;
        }
        done[at] = 0;
        if (tried == slots || (slot[0] && slot[2]) || (!slot[0] && (uint64_t)added >= fresh)) continue;
        added += !slot[0];
        for (int word = 0; word < 7; word++) check ^= rows[word];
        /* A reader sees words that don't fit together until the last one is there, and no key before that. */
        __atomic_store_n(slot + 7, ~check, __ATOMIC_SEQ_CST);
        for (int word = 2; word < 7; word++) __atomic_store_n(slot + word, rows[word], __ATOMIC_SEQ_CST);
        __atomic_store_n(slot + 1, rows[1], __ATOMIC_SEQ_CST);
        __atomic_store_n(slot + 7, check, __ATOMIC_SEQ_CST);
        __atomic_store_n(slot, rows[0], __ATOMIC_SEQ_CST);
        done[at] = 1;
    }
    return added;
}

/* For tests: the two that everything rests on. */
uint32_t gh200_crc32(const unsigned char *data, size_t size) { return crc32_of(data, size); }

int64_t gh200_inflate(const unsigned char *data, size_t size, unsigned char *out, size_t room) {
    size_t used = 0;
    return inflate_raw(data, size, out, room, &used);
}
