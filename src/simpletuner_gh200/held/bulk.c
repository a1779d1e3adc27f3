/* Many files at a time: list a folder, look at files, read them, take torch's files apart.
 *
 * From Python every system call gives the interpreter lock away and takes it back; in a run, where others want it too,
 * that costs more than the calls. Here a whole batch passes between giving and taking. Only the usual case is handled:
 * plain files that hold still and, of torch's, a zip of stored members as torch writes it, gzipped or not, whose pickle is
 * known. Whatever is anything else is marked, and Python looks at it with all the care it needs. Nothing is taken from a
 * file that changed while it was read, nor a tensor from one whose checksums don't fit.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { TAKEN, UNKNOWN, OTHER, DAMAGED, GONE, CHANGED, NO_ROOM, REFUSED, STATUSES };

struct look { /* how a file looks */
    uint64_t plain, size, mtime_ns, ctime_ns, inode;
};

struct file {
    uint64_t status;
    struct look look;
    uint64_t content, content_size; /* in the buffer: all of it, inflated */
};

static void note(struct look *look, const struct stat *found) {
    look->plain = S_ISREG(found->st_mode);
    look->size = (uint64_t)found->st_size, look->inode = found->st_ino;
    look->mtime_ns = (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec;
    look->ctime_ns = (uint64_t)found->st_ctim.tv_sec * 1000000000u + (uint64_t)found->st_ctim.tv_nsec;
}

/* -- which files there are -------------------------------------------------------------------------------------- */

#define NO_FILE UINT64_MAX /* a folder, a link, a device, or what can't be asked */

struct record { /* as getdents64(2) describes it; the C library does not declare it */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* The next entries of an open folder: their names, each with its zero, into names; their sizes, or NO_FILE, into sizes.
 * Both must have room for what scratch can hold. Plain files whose name does not end with suffix are left out. Sizes are
 * asked only where measure is set, which takes ten times as long as the names. Returns how many; 0 at the end, -errno
 * where the folder can't be read. */
int gh200_list_folder(int folder, const char *suffix, int measure, char *scratch, size_t room, char *names, size_t *used,
                      uint64_t *sizes) {
    size_t ending = strlen(suffix);
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
            size_t length = strlen(entry->name);
            int wanted = length >= ending && !memcmp(entry->name + length - ending, suffix, ending);
            if (entry->type == DT_REG && !wanted) continue;
            struct stat found = {.st_size = 0};
            int plain = entry->type == DT_REG;
            if (measure && (plain || entry->type == DT_UNKNOWN))
                plain = fstatat(folder, entry->name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode);
            memcpy(names + *used, entry->name, length + 1);
            *used += length + 1;
            sizes[count++] = plain ? (uint64_t)found.st_size : NO_FILE;
        }
    }
    return count;
}

/* How files look, by names in an open folder or paths, each with its zero. */
void gh200_look_at(int folder, const char *names, int count, struct look *looks) {
    for (int at = 0; at < count; at++, names += strlen(names) + 1) {
        struct stat found;
        memset(looks + at, 0, sizeof *looks);
        if (fstatat(folder, names, &found, 0) == 0) note(looks + at, &found);
    }
}

/* -- what is in them -------------------------------------------------------------------------------------------- */

#define ASK_EVERY 16

struct room { /* where files are read to, and which of them the kernel was asked for already */
    unsigned char *buffer;
    size_t size, used;
    int fetched;
};

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

/* Was it neither changed nor replaced? Whoever puts another file under its name takes one name from it. */
static int held_still(const struct stat *before, const struct stat *after) {
    return before->st_size == after->st_size && before->st_nlink == after->st_nlink &&
           same_time(before->st_mtim, after->st_mtim) && same_time(before->st_ctim, after->st_ctim);
}

/* All of an open file of that size; one byte more is asked for, so that growth and a size that is none show. */
static int read_all(int fd, unsigned char *to, size_t size) {
    size_t done = 0;
    do {
        ssize_t got = pread(fd, to + done, size + 1 - done, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return OTHER;
        if (got == 0) break;
        done += (size_t)got;
    } while (done < size);
    return done == size ? TAKEN : CHANGED;
}

/* Reads one file to the end of what the buffer holds. left: how many names there are from this one on, which are fetched
 * ahead where this one has to come from the disk. */
static int read_one(int folder, const char *name, int left, int give_back, struct room *room, struct file *file) {
    struct stat before, after;
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK), status = OTHER;
    if (fd < 0) return errno == ENOENT ? GONE : OTHER;
    if (fstat(fd, &before) == 0 && S_ISREG(before.st_mode)) {
        note(&file->look, &before);
        file->content = room->used, file->content_size = file->look.size;
        if (!room->fetched && left % ASK_EVERY == 0 && is_cold(fd)) {
            fetch_ahead(folder, name, left);
            room->fetched = 1;
        }
        status = NO_ROOM;
        if (file->look.size < room->size - room->used) status = read_all(fd, room->buffer + room->used, file->look.size);
        if (status == TAKEN && (fstat(fd, &after) != 0 || !held_still(&before, &after))) status = CHANGED;
        if (status == TAKEN && give_back) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    }
    close(fd);
    return status;
}

static void keep(struct room *room, const struct file *file) {
    room->used += (file->content_size + 63) / 64 * 64;
    if (room->used > room->size) room->used = room->size;
}

/* Reads files of one folder one behind the other, each with its status: what is not TAKEN takes no room. Gives the page
 * cache of what was read back if asked to. */
void gh200_read_files(const char *path, const char *names, int count, unsigned char *buffer, size_t size, int give_back,
                      struct file *files) {
    struct room room = {buffer, size, 0, 0};
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int at = 0; at < count; at++, names += strlen(names) + 1) {
        memset(files + at, 0, sizeof *files);
        int status = folder < 0 ? OTHER : read_one(folder, names, count - at, give_back, &room, files + at);
        files[at].status = (uint64_t)status;
        if (status == TAKEN) keep(&room, files + at);
    }
    if (folder >= 0) close(folder);
}

/* -- torch's files ---------------------------------------------------------------------------------------------- */

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

struct tensor_file {
    struct file file;
    uint64_t shape, pickle, pickle_size, finite;
    uint64_t storages[MOST_STORAGES]; /* where each begins in the buffer */
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

static uint64_t number(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

/* -- ISA-L: inflating and checksums ----------------------------------------------------------------------------- */

struct inflate_state { /* how ISA-L's begins; all of it is smaller than STATE_BYTES */
    unsigned char *next_out;
    uint32_t avail_out, total_out;
    const unsigned char *next_in;
    uint64_t read_in;
    uint32_t avail_in;
    int32_t read_in_length;
};

#define STATE_BYTES (256 << 10)

struct isal { /* of the library that Python's isal package brings */
    void (*inflate_init)(struct inflate_state *);
    int (*inflate)(struct inflate_state *);
    uint32_t (*crc32)(uint32_t, const unsigned char *, uint64_t);
};

static struct isal isal;

void gh200_use_isal(const struct isal *given) { isal = *given; }

/* Where the compressed bytes of a gzip file begin; 0 where the header is none that we know. */
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

/* Unpacks the gzip file that lies at the end of what the buffer holds to where it lies, by way of scratch. */
static int gunzip(const struct room *room, unsigned char *scratch, size_t scratch_size, struct file *file) {
    size_t size = file->content_size;
    unsigned char *out = room->buffer + room->used, *packed = scratch + STATE_BYTES;
    if (size > scratch_size - STATE_BYTES) return OTHER;
    memcpy(packed, out, size);
    size_t body = gzip_body(packed, size);
    if (!body) return OTHER;
    file->content_size = number(packed + size - 4, 4);
    if (file->content_size >= room->size - room->used) return NO_ROOM;
    struct inflate_state *state = (struct inflate_state *)scratch;
    isal.inflate_init(state);
    state->next_in = packed + body, state->avail_in = (uint32_t)(size - body - 8);
    state->next_out = out, state->avail_out = (uint32_t)file->content_size;
    if (isal.inflate(state) != 0 || state->avail_out || state->avail_in) return DAMAGED; /* or several in one: rare */
    return isal.crc32(0, out, file->content_size) == number(packed + size - 8, 4) ? TAKEN : DAMAGED;
}

/* -- numbers that are none -------------------------------------------------------------------------------------- */

/* Made for several processors, of which the loader chooses, where it can. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MANY_AT_ONCE __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define MANY_AT_ONCE
#endif

#define LOOKED_AT_ONCE 16384 /* stays in the innermost cache from its checksum to the look at it */

/* Adding one to exponent bits that are all set carries into the sign bit, which they never reach otherwise. Done on
 * eight bytes at a time, whatever the size of a number: nothing carries from one into the next. */
struct search {
    uint64_t mask, one; /* the exponent bits of each number in a word, and the lowest of them; 0: nothing is looked for */
    uint64_t found;     /* mask + one in any of its bits where a number is none */
};

MANY_AT_ONCE static uint64_t carries(const unsigned char *data, size_t words, uint64_t mask, uint64_t one) {
    uint64_t found = 0, word;
    for (size_t at = 0; at < words; at++) {
        memcpy(&word, data + 8 * at, 8);
        found |= (word & mask) + one;
    }
    return found;
}

static void search_in(const unsigned char *data, size_t size, struct search *search) {
    uint64_t last = 0;
    memcpy(&last, data + size / 8 * 8, size % 8);
    search->found |= carries(data, size / 8, search->mask, search->one) | ((last & search->mask) + search->one);
}

static uint32_t crc32_searching(const unsigned char *data, size_t size, struct search *search) {
    if (!search->mask) return isal.crc32(0, data, size);
    uint32_t crc = 0;
    for (size_t at = 0; at < size; at += LOOKED_AT_ONCE) {
        size_t some = size - at < LOOKED_AT_ONCE ? size - at : LOOKED_AT_ONCE;
        crc = isal.crc32(crc, data + at, some);
        search_in(data + at, some, search);
    }
    return crc;
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
static int open_zip(const unsigned char *data, size_t size, struct tensor_file *file, struct storage *storages) {
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
        if (isal.crc32(0, data + member.at, member.size) != member.crc) return DAMAGED;
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
static struct search search_for(const struct leaf *leaf) {
    struct search search = {0, 0, 0};
    for (uint64_t at = 0; leaf && leaf->exponent && at < 8; at += leaf->word) {
        search.mask |= leaf->exponent << 8 * at;
        search.one |= (leaf->exponent & -leaf->exponent) << 8 * at;
    }
    return search;
}

/* Whole numbers are finite; what can't be asked counts as not finite. */
static int is_finite(const struct leaf *leaf, const struct search *search) {
    return leaf->exponent ? !(search->found & (search->mask + search->one)) : leaf->word != 0;
}

/* Does its checksum fit? In the same pass: are the numbers of the leaf finite that is all of the storage, if one is? */
static int is_whole(const unsigned char *data, const struct storage *storage, const struct leaf *leaf, uint64_t *finite) {
    struct search search = search_for(leaf);
    uint32_t crc = crc32_searching(data, storage->size, &search);
    if (leaf && *finite) *finite = (uint64_t)is_finite(leaf, &search);
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

static const struct shape *shape_of(const unsigned char *data, const struct tensor_file *file, const struct shape *shapes,
                                    uint64_t count) {
    for (const struct shape *shape = shapes; shape < shapes + count; shape++)
        if (shape->pickle_size == file->pickle_size && !memcmp(data + file->pickle, shape->pickle, shape->pickle_size))
            return shape;
    return NULL;
}

/* Checks the storages, and tells whether the pickle is one that was understood. */
static int recognise(const unsigned char *data, struct tensor_file *file, const struct storage *storages,
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
        struct search search = search_for(leaf);
        search_in(data + file->storages[leaf->storage] + leaf->from, leaf->size, &search);
        finite = (uint64_t)is_finite(leaf, &search);
    }
    file->finite = finite;
    return TAKEN;
}

/* Reads and takes apart files one after the other until the buffer is full; each with its status. paths: each with its
 * zero. Returns how many were looked at: those from the first NO_ROOM on were not, unless that is the very first.
 * counts: how many have each status. */
int gh200_take_files(const char *paths, int count, unsigned char *buffer, size_t size, unsigned char *scratch,
                     size_t scratch_size, const struct shape *shapes, uint64_t shape_count, int look_for_nan,
                     struct tensor_file *files, uint64_t *counts) {
    struct room room = {buffer, size, 0, 0};
    memset(counts, 0, STATUSES * sizeof *counts);
    for (int at = 0; at < count; at++, paths += strlen(paths) + 1) {
        struct tensor_file *one = files + at;
        struct storage storages[MOST_STORAGES];
        unsigned char *data = buffer + room.used;
        memset(one, 0, offsetof(struct tensor_file, storages));
        int status = read_one(AT_FDCWD, paths, count - at, 0, &room, &one->file);
        int gzipped = status == TAKEN && one->file.look.size >= 18 && data[0] == 0x1f && data[1] == 0x8b;
        if (gzipped) status = gunzip(&room, scratch, scratch_size, &one->file);
        if (status == NO_ROOM && at) return at;
        if (status == TAKEN) status = open_zip(data, one->file.content_size, one, storages);
        if (status == TAKEN) status = recognise(data, one, storages, shapes, shape_count, look_for_nan);
        one->file.status = (uint64_t)status;
        counts[status]++;
        if (status == NO_ROOM) return 1;
        /* What is taken stays in the buffer until it is written out; so does a pickle that is to be learned. */
        if (status == TAKEN || status == UNKNOWN) keep(&room, &one->file);
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
int gh200_put_payloads(const unsigned char *buffer, const struct shape *shapes, const struct tensor_file *files,
                       const uint32_t *which, const uint64_t *offsets, int count, int fd, unsigned char *memory) {
    struct writing out = {.count = 0, .fd = fd};
    for (int at = 0; at < count; at++) {
        const struct tensor_file *file = files + which[at];
        const struct shape *shape = shapes + file->shape;
        for (uint64_t leaf = 0; leaf < shape->leaf_count; leaf++) {
            const struct leaf *one = shape->leaves + leaf;
            const unsigned char *from = buffer + file->file.content + file->storages[one->storage] + one->from;
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

/* -- batches ---------------------------------------------------------------------------------------------------- */

/* Rows of one size, wherever they lie, without the bytes each begins with, one behind the other. */
void gh200_copy_rows(unsigned char *to, const uint64_t *rows, int count, size_t size, size_t skip) {
    for (int at = 0; at < count; at++, to += size) memcpy(to, (const void *)(uintptr_t)(rows[at] + skip), size);
}
