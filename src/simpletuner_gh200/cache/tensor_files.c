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
#include <sys/uio.h>
#include <unistd.h>

#include "inflate.h"

enum { TAKEN, UNKNOWN, OTHER, DAMAGED, GONE, CHANGED, NO_ROOM, REFUSED, STATUSES };

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
    uint32_t crc;
};

struct storage { /* as the directory describes it; size UINT64_MAX: there is none */
    uint64_t size;
    uint32_t crc;
};

struct room { /* where files are read to */
    unsigned char *buffer, *scratch;
    size_t size, used, scratch_size;
    int gzipped; /* the last file was: those of one cache are alike */
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
    *member = (struct member){entry + 46, name_size, at, size, (uint32_t)number(entry + 16, 4)};
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

/* Finds the pickle and the storages of one file in memory. Checksums are checked of all but the storages. */
static int open_zip(const unsigned char *data, size_t size, struct file *file, struct storage *storages) {
    size_t directory, bytes, count, root = 0;
    const unsigned char *root_name = NULL;
    if (!find_directory(data, size, &directory, &bytes, &count)) return OTHER;
    for (int at = 0; at < MOST_STORAGES; at++) storages[at].size = UINT64_MAX;
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
            if (storages[storage].size != UINT64_MAX) return OTHER;
            file->storages[storage] = member.at, storages[storage] = (struct storage){member.size, member.crc};
            continue;
        }
        if (crc32_of(data + member.at, member.size) != member.crc) return DAMAGED;
        if (named(&member, root, "data.pkl")) {
            if (file->pickle_size || !member.size) return OTHER;
            file->pickle = member.at, file->pickle_size = member.size;
        } else if (!known_besides(data, &member, root)) return OTHER;
    }
    if (next != limit) return DAMAGED;
    return file->pickle_size ? TAKEN : OTHER;
}

/* -- what is in it ---------------------------------------------------------------------------------------------- */

/* What to look for in a leaf that can hold numbers that are none. */
static struct look look_for(const struct leaf *leaf) {
    struct look look = {0, 0, 0};
    for (uint64_t at = 0; leaf && leaf->exponent && at < 8; at += leaf->word) {
        look.mask |= leaf->exponent << 8 * at;
        look.one |= (leaf->exponent & -leaf->exponent) << 8 * at;
    }
    return look;
}

/* Whole numbers are finite; what can't be asked counts as not finite. */
static int is_finite(const struct leaf *leaf, const struct look *look) {
    return leaf->exponent ? !(look->found & (look->mask + look->one)) : leaf->word != 0;
}

/* Does its checksum fit? In the same pass: are the numbers of the leaf finite that is all of the storage, if one is? */
static int is_whole(const unsigned char *data, const struct storage *storage, const struct leaf *leaf, uint64_t *finite) {
    struct look look = look_for(leaf);
    uint32_t crc = crc32_looking(0, data, storage->size, &look);
    if (leaf && *finite) *finite = (uint64_t)is_finite(leaf, &look);
    return crc == storage->crc;
}

static int fits(const struct shape *shape, const struct storage *storages) {
    for (uint64_t at = 0; at < MOST_STORAGES; at++)
        if (storages[at].size != (at < shape->storage_count ? shape->storage_sizes[at] : UINT64_MAX)) return 0;
    return 1;
}

static int is_all_of(const struct leaf *leaf, uint64_t number, const struct storage *storage) {
    return leaf->storage == number && leaf->size == storage->size && leaf->size;
}

static const struct leaf *leaf_of(const struct shape *shape, uint64_t number, const struct storage *storage) {
    for (uint64_t at = 0; at < shape->leaf_count; at++)
        if (is_all_of(shape->leaves + at, number, storage)) return shape->leaves + at;
    return NULL;
}

static const struct shape *shape_of(const unsigned char *data, const struct file *file, const struct shape *shapes,
                                    uint64_t count) {
    for (const struct shape *shape = shapes; shape < shapes + count; shape++)
        if (shape->pickle_size == file->pickle_size && !memcmp(data + file->pickle, shape->pickle, shape->pickle_size))
            return shape;
    return NULL;
}

/* Checks the storages, and tells whether the pickle is one that was understood. */
static int recognise(const unsigned char *data, struct file *file, const struct storage *storages,
                     const struct shape *shapes, uint64_t count, int look_for_nan) {
    const struct shape *shape = shape_of(data, file, shapes, count);
    int understood = shape && fits(shape, storages), looking = look_for_nan && understood && !shape->refused;
    uint64_t finite = (uint64_t)looking;
    for (uint64_t at = 0; at < MOST_STORAGES; at++) {
        if (storages[at].size == UINT64_MAX) continue;
        const struct leaf *leaf = looking ? leaf_of(shape, at, storages + at) : NULL;
        if (!is_whole(data + file->storages[at], storages + at, leaf, &finite)) return DAMAGED;
    }
    if (!shape) return UNKNOWN;
    if (!understood) return OTHER;
    file->shape = (uint64_t)(shape - shapes);
    if (shape->refused) return REFUSED;
    for (uint64_t at = 0; at < shape->leaf_count && finite; at++) {
        const struct leaf *leaf = shape->leaves + at;
        if (leaf->size && leaf == leaf_of(shape, leaf->storage, storages + leaf->storage)) continue;
        struct look look = look_for(leaf);
        look_at(data + file->storages[leaf->storage] + leaf->from, leaf->size, &look);
        finite = (uint64_t)is_finite(leaf, &look);
    }
    file->finite = finite;
    return TAKEN;
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

static int is_kind(const unsigned char *start, int gzipped) {
    return gzipped ? start[0] == 0x1f && start[1] == 0x8b : start[0] == 'P' && start[1] == 'K';
}

/* All of an open file to the end of what the buffer holds, through scratch where it is gzipped, taking it for what the
 * last one was. *mistaken becomes 1 where it is not. */
static int read_as(int fd, struct room *room, struct file *file, int *mistaken) {
    unsigned char start[2], *out = room->buffer + room->used, *to = room->gzipped ? room->scratch : out;
    size_t left = room->size - room->used, most = room->gzipped ? room->scratch_size : left, size = file->size;
    if (size < 2 || !read_all(fd, size > most ? start : to, size > most ? 2 : size)) return OTHER;
    if (!is_kind(size > most ? start : to, room->gzipped)) {
        *mistaken = 1;
        return OTHER;
    }
    file->content_size = room->gzipped ? 0 : size;
    if (size > most) return room->gzipped ? OTHER : NO_ROOM;
    if (!room->gzipped) return TAKEN;
    size_t made = 0;
    int status = is_gzip(to, size) ? gunzip(to, size, out, left, &made) : OTHER;
    file->content_size = made;
    return status;
}

/* Reads one file to the end of what the buffer holds. A link is told by opening, not by a look of its own. */
static int read_one(const char *path, struct room *room, struct file *file) {
    struct stat found;
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, fd = open(path, flags | O_NOFOLLOW), link = fd < 0 && errno == ELOOP;
    if (link) fd = open(path, flags);
    if (fd < 0) return errno == ENOENT ? GONE : OTHER;
    int status = OTHER, mistaken = 0;
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode)) {
        note(file, &found);
        file->ordinary = !link && found.st_nlink == 1;
        status = read_as(fd, room, file, &mistaken);
        if (mistaken) {
            room->gzipped = !room->gzipped;
            status = read_as(fd, room, file, &mistaken);
        }
        if (fstat(fd, &found) != 0 || !same(file, &found)) status = CHANGED;
    }
    close(fd);
    return status;
}

/* Reads and takes apart files one after the other until the buffer is full; each with its status. paths: each with its
 * zero. Returns how many were looked at: those from the first NO_ROOM on were not, unless that is the very first.
 * counts: how many have each status. */
int gh200_take_files(const char *paths, int count, unsigned char *buffer, size_t size, unsigned char *scratch,
                     size_t scratch_size, const struct shape *shapes, uint64_t shape_count, int look_for_nan,
                     struct file *files, uint64_t *counts) {
    memset(counts, 0, STATUSES * sizeof *counts);
    struct room room = {buffer, scratch, size, 0, scratch_size, 0};
    for (int at = 0; at < count; at++, paths += strlen(paths) + 1) {
        struct file *file = files + at;
        memset(file, 0, offsetof(struct file, storages));
        file->finite = 0;
        file->content = room.used;
        int status = read_one(paths, &room, file);
        if (status == NO_ROOM && at) return at;
        struct storage storages[MOST_STORAGES];
        const unsigned char *data = buffer + room.used;
        if (status == TAKEN) status = open_zip(data, file->content_size, file, storages);
        if (status == TAKEN) status = recognise(data, file, storages, shapes, shape_count, look_for_nan);
        file->status = (uint64_t)status;
        counts[status]++;
        if (status == NO_ROOM) return 1;
        /* What is taken stays in the buffer until it is written out; so does a pickle that is to be learned. */
        if (status == TAKEN || status == UNKNOWN) room.used += (file->content_size + 63) / 64 * 64;
        if (room.used > size) room.used = size;
    }
    return count;
}

#define WRITTEN_AT_ONCE 64

struct writing { /* pieces that lie one behind the other where they are going */
    struct iovec pieces[WRITTEN_AT_ONCE];
    int count, fd;
    uint64_t start, end;
};

/* Returns 0, or the error. */
static int write_out(struct writing *out) {
    struct iovec *piece = out->pieces;
    while (out->count) {
        ssize_t put = pwritev(out->fd, piece, out->count, (off_t)out->start);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put ? errno : EIO;
        for (out->start += (uint64_t)put; out->count && (size_t)put >= piece->iov_len; piece++, out->count--)
            put -= (ssize_t)piece->iov_len;
        if (out->count) piece->iov_base = (char *)piece->iov_base + put, piece->iov_len -= (size_t)put;
    }
    return 0;
}

/* Writes the payloads of taken files: through the descriptor where there is one, since pages that are written whole
 * needn't be cleared first, and neighbours at once, since every call locks the file; else to memory. Returns 0, or the
 * error. */
int gh200_put_payloads(const unsigned char *buffer, const struct shape *shapes, const struct file *files,
                       const uint32_t *which, const uint64_t *offsets, int count, int fd, unsigned char *memory) {
    struct writing out = {.count = 0, .fd = fd};
    for (int at = 0; at < count; at++) {
        const struct file *file = files + which[at];
        const struct shape *shape = shapes + file->shape;
        for (uint64_t leaf = 0; leaf < shape->leaf_count; leaf++) {
            const struct leaf *one = shape->leaves + leaf;
            const unsigned char *from = buffer + file->content + file->storages[one->storage] + one->from;
            uint64_t to = offsets[at] + one->at;
            if (!one->size) continue;
            if (fd < 0) {
                memcpy(memory + to, from, one->size);
                continue;
            }
            if (out.count == WRITTEN_AT_ONCE || (out.count && to != out.end)) {
                int refused = write_out(&out);
                if (refused) return refused;
            }
            if (!out.count) out.start = to;
            out.pieces[out.count++] = (struct iovec){(void *)from, one->size};
            out.end = to + one->size;
        }
    }
    return write_out(&out);
}

/* -- which files there are -------------------------------------------------------------------------------------- */

struct record { /* as getdents64(2) describes it; the C library does not declare it */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* The next entries of an open folder that end with suffix and are plain files: names, each with its zero. Whatever
 * else there is goes to others, likewise. Each has room for all that scratch can hold. counts: of names, of
 * others, and how many bytes these two take. Returns 1, 0 at the end, -errno where the folder can't be read. */
int gh200_list_tensors(int folder, const char *suffix, char *scratch, size_t room, char *names, char *others,
                       uint64_t *counts) {
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
        if (entry->type == DT_REG && !wanted) continue;
        if (entry->type == DT_REG) {
            memcpy(names + counts[2], entry->name, length + 1);
            counts[0]++, counts[2] += length + 1;
        } else {
            memcpy(others + counts[3], entry->name, length + 1);
            counts[1]++, counts[3] += length + 1;
        }
    }
    return 1;
}

/* How files look, by path, each with its zero; six words each: whether it is a plain file, size, times of change of
 * content and of anything, inode, and whether it has one name and is no link. */
void gh200_look_at(const char *paths, int count, uint64_t *rows) {
    for (int at = 0; at < count; at++, paths += strlen(paths) + 1, rows += 6) {
        struct stat found;
        struct file file;
        memset(rows, 0, 6 * sizeof *rows);
        if (lstat(paths, &found) != 0) continue;
        int link = S_ISLNK(found.st_mode);
        if (link && stat(paths, &found) != 0) continue;
        note(&file, &found);
        rows[0] = S_ISREG(found.st_mode), rows[1] = file.size, rows[2] = file.mtime_ns, rows[3] = file.ctime_ns;
        rows[4] = file.inode, rows[5] = !link && found.st_nlink == 1;
    }
}

/* Sizes of files of an open folder, names each with its zero; 0 for what is not there any more. */
void gh200_file_sizes(int folder, const char *names, int count, uint64_t *sizes) {
    for (int at = 0; at < count; at++, names += strlen(names) + 1) {
        struct stat found;
        sizes[at] = fstatat(folder, names, &found, 0) == 0 ? (uint64_t)found.st_size : 0;
    }
}

/* -- the index -------------------------------------------------------------------------------------------------- */

#define SLOT_WORDS 8
#define SEAL UINT64_C(0x9E3779B97F4A7C15)

/* Which of these keys, two words each, have something published under them: held[i] becomes 1. A slot that is being written
 * counts as empty, as it does for any other reader. */
void gh200_find_slots(const uint64_t *words, uint64_t slots, const uint64_t *keys, int count, unsigned char *held) {
    for (int at = 0; at < count; at++, keys += 2) {
        uint64_t index = keys[0] & (slots - 1), tried = 0;
        const uint64_t *slot = words + index * SLOT_WORDS;
        for (; slot[0] && (slot[0] != keys[0] || slot[1] != keys[1]) && tried < slots; tried++) {
            index = (index + 1) & (slots - 1);
            slot = words + index * SLOT_WORDS;
        }
        uint64_t check = SEAL;
        for (int word = 0; word < SLOT_WORDS - 1; word++) check ^= slot[word];
        held[at] = tried < slots && slot[0] && slot[2] && check == slot[SLOT_WORDS - 1];
    }
}

/* Every store to the table of slots.py; row: seven words, key first. What was written before it, an entry's bytes above all,
 * is seen by whoever sees the slot. A reader sees words that don't fit together until the last one is there, and no key
 * before that. */
static void write_slot(uint64_t *slot, const uint64_t *row) {
    uint64_t check = SEAL;
    for (int word = 0; word < 7; word++) check ^= row[word];
    __atomic_store_n(slot + 7, ~check, __ATOMIC_SEQ_CST);
    for (int word = 2; word < 7; word++) __atomic_store_n(slot + word, row[word], __ATOMIC_SEQ_CST);
    __atomic_store_n(slot + 1, row[1], __ATOMIC_SEQ_CST);
    __atomic_store_n(slot + 7, check, __ATOMIC_SEQ_CST);
    __atomic_store_n(slot, row[0], __ATOMIC_SEQ_CST);
}

void gh200_write_slot(uint64_t *words, uint64_t index, const uint64_t *row) { write_slot(words + index * SLOT_WORDS, row); }

/* Publishes entries in the table of slots.py, whose lock the caller holds, at most fresh of them under keys that are new
 * to it. rows: seven words each, key first. done[i] becomes 1 where entry i is published, 0 where something is published
 * under its key already, or the table is full: those are left alone. Returns how many keys were new. */
int gh200_enter_slots(uint64_t *words, uint64_t slots, const uint64_t *rows, int count, uint64_t fresh, unsigned char *done) {
    int added = 0;
    for (int at = 0; at < count; at++, rows += 7) {
        uint64_t index = rows[0] & (slots - 1), tried = 0;
        uint64_t *slot = words + index * SLOT_WORDS;
        for (; slot[0] && (slot[0] != rows[0] || slot[1] != rows[1]) && tried < slots; tried++) {
            index = (index + 1) & (slots - 1);
            slot = words + index * SLOT_WORDS;
        }
        done[at] = 0;
        if (tried == slots || (slot[0] && slot[2]) || (!slot[0] && (uint64_t)added >= fresh)) continue;
        added += !slot[0];
        write_slot(slot, rows);
        done[at] = 1;
    }
    return added;
}

/* -- batches ---------------------------------------------------------------------------------------------------- */

/* Rows of one size, wherever they lie, without the bytes each begins with, one behind the other. */
void gh200_copy_rows(unsigned char *to, const uint64_t *rows, int count, size_t size, size_t skip) {
    for (int at = 0; at < count; at++, to += size) memcpy(to, (const void *)(uintptr_t)(rows[at] + skip), size);
}

/* For tests: the two that everything rests on. */
uint32_t gh200_crc32(const unsigned char *data, size_t size) { return crc32_of(data, size); }

int64_t gh200_inflate(const unsigned char *data, size_t size, unsigned char *out, size_t room) {
    size_t used = 0;
    return inflate_raw(data, size, out, room, &used);
}
