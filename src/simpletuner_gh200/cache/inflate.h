/* DEFLATE (RFC 1951) and CRC-32, as fast as one core gets them: what stands between a gzipped cache file and its tensor.
 *
 * The decoder looks at 11 bits at a time; where they hold two literals, as they mostly do in tensors, both come out of
 * one look-up. Near either end of its buffers it goes symbol by symbol, so it reads and writes nothing beyond them.
 */
#ifndef GH200_INFLATE_H
#define GH200_INFLATE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

/* -- numbers that are none -------------------------------------------------------------------------------------- */

/* Made for several processors, of which the loader chooses, where it can. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MANY_AT_ONCE __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define MANY_AT_ONCE
#endif

/* Adding one to exponent bits that are all set carries into the sign bit, which they never reach otherwise. Done on
 * eight bytes at a time, whatever the size of a number: nothing carries from one into the next. */
struct look {
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

static void look_at(const unsigned char *data, size_t size, struct look *look) {
    uint64_t last = 0;
    memcpy(&last, data + size / 8 * 8, size % 8);
    look->found |= carries(data, size / 8, look->mask, look->one) | ((last & look->mask) + look->one);
}

/* -- CRC-32, as gzip and zip define it ------------------------------------------------------------------------- */

static uint32_t crc_table[8][256];
static pthread_once_t crc_made = PTHREAD_ONCE_INIT;

static void make_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
        crc_table[0][byte] = value;
    }
    for (int step = 1; step < 8; step++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[step - 1][byte];
            crc_table[step][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
}

/* On the complemented value, as all of these. */
static uint32_t crc_by_table(uint32_t crc, const unsigned char *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++) crc ^= crc_table[7 - byte][word >> 8 * byte & 255];
    }
    for (; size; data++, size--) crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(__x86_64__)
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define FOLD(part, by, next) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(part, by, 0x00), _mm_clmulepi64_si128(part, by, 0x11)), next)

/* Carry-less multiplication folds 64 bytes at a time onto the next 64: what remains has the same remainder. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const unsigned char *data,
                                                                        size_t size) {
    const __m128i by_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i part0 = LOAD(data), part1 = LOAD(data + 16), part2 = LOAD(data + 32), part3 = LOAD(data + 48);
    part0 = _mm_xor_si128(part0, _mm_cvtsi32_si128((int)crc));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        part0 = FOLD(part0, by_four, LOAD(data)), part1 = FOLD(part1, by_four, LOAD(data + 16));
        part2 = FOLD(part2, by_four, LOAD(data + 32)), part3 = FOLD(part3, by_four, LOAD(data + 48));
    }
    __m128i one = FOLD(FOLD(FOLD(part0, by_one, part1), by_one, part2), by_one, part3);
    unsigned char rest[16];
    _mm_storeu_si128((__m128i *)rest, one);
    return crc_by_table(crc_by_table(0, rest, 16), data, size);
}

#define WIDE(part, by, next) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(part, by, 0x00), _mm512_clmulepi64_epi128(part, by, 0x11), next, 0x96)

#define LOOK(part) seen = _mm512_or_si512(seen, _mm512_add_epi64(_mm512_and_si512(part, mask), one))

/* The same, 256 bytes at a time, where the processor multiplies four at once; all but the last size % 256 of them are
 * looked at on the way, which costs nothing beside the multiplying. */
__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) static uint32_t crc_by_wide_folding(
    uint32_t crc, const unsigned char *data, size_t size, struct look *look) {
    const __m512i by_sixteen = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i by_four = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1c6e41596, 0x154442bd4));
    const __m128i by_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m512i part0 = _mm512_loadu_si512(data), part1 = _mm512_loadu_si512(data + 64);
    __m512i part2 = _mm512_loadu_si512(data + 128), part3 = _mm512_loadu_si512(data + 192);
    const __m512i mask = _mm512_set1_epi64((int64_t)look->mask), one = _mm512_set1_epi64((int64_t)look->one);
    __m512i seen = _mm512_setzero_si512();
    LOOK(part0), LOOK(part1), LOOK(part2), LOOK(part3);
    part0 = _mm512_xor_si512(part0, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
        __m512i next0 = _mm512_loadu_si512(data), next1 = _mm512_loadu_si512(data + 64);
        __m512i next2 = _mm512_loadu_si512(data + 128), next3 = _mm512_loadu_si512(data + 192);
        LOOK(next0), LOOK(next1), LOOK(next2), LOOK(next3);
        part0 = WIDE(part0, by_sixteen, next0), part1 = WIDE(part1, by_sixteen, next1);
        part2 = WIDE(part2, by_sixteen, next2), part3 = WIDE(part3, by_sixteen, next3);
    }
    look->found |= (uint64_t)_mm512_reduce_or_epi64(seen);
    __m512i whole = WIDE(WIDE(WIDE(part0, by_four, part1), by_four, part2), by_four, part3);
    __m128i last = _mm512_castsi512_si128(whole);
    last = FOLD(last, by_one, _mm512_extracti32x4_epi32(whole, 1));
    last = FOLD(last, by_one, _mm512_extracti32x4_epi32(whole, 2));
    last = FOLD(last, by_one, _mm512_extracti32x4_epi32(whole, 3));
    unsigned char rest[16];
    _mm_storeu_si128((__m128i *)rest, last);
    return crc_by_table(crc_by_table(0, rest, 16), data, size);
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) static uint32_t crc_by_instruction(uint32_t crc, const unsigned char *data,
                                                                   size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        crc = __crc32d(crc, word);
    }
    for (; size; data++, size--) crc = __crc32b(crc, *data);
    return crc;
}
#endif

static uint32_t crc32_narrow(uint32_t crc, const unsigned char *data, size_t size) {
#if defined(__x86_64__)
    if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        return ~crc_by_folding(~crc, data, size);
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) return ~crc_by_instruction(~crc, data, size);
#endif
    return ~crc_by_table(~crc, data, size);
}

#define LOOKED_AT_ONCE 16384 /* stays in the innermost cache from one look to the next */

/* The checksum of what came before, which had this one, and of these bytes; looks at all of them besides. */
static uint32_t crc32_looking(uint32_t crc, const unsigned char *data, size_t size, struct look *look) {
    pthread_once(&crc_made, make_crc_table);
#if defined(__x86_64__)
    if (size >= 256 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
        look_at(data + size / 256 * 256, size % 256, look);
        return ~crc_by_wide_folding(~crc, data, size, look);
    }
#endif
    for (size_t at = 0; at < size; at += LOOKED_AT_ONCE) {
        size_t some = size - at < LOOKED_AT_ONCE ? size - at : LOOKED_AT_ONCE;
        crc = crc32_narrow(crc, data + at, some);
        if (look->mask) look_at(data + at, some, look);
    }
    return crc;
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    struct look nothing = {0, 0, 0};
    return crc32_looking(0, data, size, &nothing);
}

/* -- DEFLATE ---------------------------------------------------------------------------------------------------- */

#define LITERAL_BITS 11
#define DISTANCE_BITS 9
#define LONGEST_CODE 15
#define LITERAL 0x8000u /* one literal in bits 16..23 */
#define PAIR 0x4000u    /* a second one in bits 24..31 */
#define FINISHED 0x2000u
#define FURTHER 0x1000u /* look on in the table at bits 16.., by as many bits as bits 8..11 say */

/* An entry: how many bits it takes (0..7), extra bits or size of a further table (8..11), flags, value (16..). */
struct tables {
    uint32_t literal[(1 << LITERAL_BITS) + 2048];
    uint32_t distance[(1 << DISTANCE_BITS) + 2048];
};

static const uint16_t length_base[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                         31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
static const uint8_t length_extra[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
static const uint16_t distance_base[30] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                           193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};

static uint32_t literal_entry(unsigned symbol) {
    if (symbol < 256) return LITERAL | symbol << 16;
    if (symbol == 256) return FINISHED;
    if (symbol > 285) return 0;
    return (uint32_t)length_base[symbol - 257] << 16 | (uint32_t)length_extra[symbol - 257] << 8;
}

static uint32_t distance_entry(unsigned symbol) {
    if (symbol > 29) return 0;
    return (uint32_t)distance_base[symbol] << 16 | (uint32_t)(symbol < 4 ? 0 : symbol / 2 - 1) << 8;
}

static uint32_t plain_entry(unsigned symbol) { return symbol << 16; }

/* The table of a canonical code. 0 where the lengths are none. Entries that no code reaches stay 0, which takes no bits
 * and is an error where it is met. */
static int make_table(uint32_t *table, size_t room, unsigned bits, const uint8_t *lengths, unsigned symbols,
                      uint32_t (*entry)(unsigned)) {
    unsigned counts[LONGEST_CODE + 1] = {0}, starts[LONGEST_CODE + 2] = {0}, longest = 0;
    for (unsigned symbol = 0; symbol < symbols; symbol++) counts[lengths[symbol]]++;
    unsigned used = symbols - counts[0];
    counts[0] = 0;
    int left = 1;
    for (unsigned length = 1; length <= LONGEST_CODE; length++) {
        left = left * 2 - (int)counts[length];
        if (left < 0) return 0;
        if (counts[length]) longest = length;
        starts[length + 1] = starts[length] + counts[length];
    }
    if (left > 0 && !(used <= 1 && longest <= 1)) return 0; /* incomplete, but for the single distance that is allowed */
    uint16_t sorted[320];
    for (unsigned symbol = 0; symbol < symbols; symbol++)
        if (lengths[symbol]) sorted[starts[lengths[symbol]]++] = (uint16_t)symbol;
    memset(table, 0, sizeof(uint32_t) << bits);
    size_t end = (size_t)1 << bits;
    unsigned code = 0, wide = longest > bits ? longest - bits : 0; /* the code as it comes: its first bit lowest */
    for (unsigned at = 0; at < used; at++) {
        unsigned length = lengths[sorted[at]];
        uint32_t made = entry(sorted[at]);
        if (length <= bits) {
            if (made || entry == plain_entry) made |= length;
            for (size_t place = code; place < (size_t)1 << bits; place += (size_t)1 << length) table[place] = made;
        } else {
            unsigned first = code & ((1u << bits) - 1);
            if (!table[first]) {
                if (end + ((size_t)1 << wide) > room) return 0;
                memset(table + end, 0, sizeof(uint32_t) << wide);
                table[first] = FURTHER | (uint32_t)end << 16 | wide << 8 | bits;
                end += (size_t)1 << wide;
            }
            if (made) made |= length - bits;
            for (size_t place = code >> bits; place < (size_t)1 << wide; place += (size_t)1 << (length - bits))
                table[(table[first] >> 16) + place] = made;
        }
        unsigned bit = 1u << (length - 1);
        for (; code & bit; bit >>= 1) code ^= bit;
        code |= bit;
    }
    return 1;
}

/* From the end: what a shorter rest of the bits decodes to is still single when it is asked. */
static void pair_literals(uint32_t *table) {
    for (unsigned at = 1 << LITERAL_BITS; at-- > 0;) {
        uint32_t first = table[at];
        if (!(first & LITERAL)) continue;
        unsigned taken = first & 255;
        uint32_t second = table[at >> taken];
        if ((second & (LITERAL | PAIR)) == LITERAL && (second & 255) + taken <= LITERAL_BITS)
            table[at] = ((first & 0xFF0000u) | LITERAL | PAIR | (second & 0xFF0000u) << 8 | (taken + (second & 255)));
    }
}

struct bits {
    const unsigned char *next, *end;
    uint64_t word;
    unsigned have;
    unsigned invented; /* zero bytes taken behind the end */
};

static inline void refill(struct bits *in) {
    if (in->end - in->next >= 8) {
        uint64_t more;
        memcpy(&more, in->next, 8);
        in->word |= more << in->have;
        in->next += (63 - in->have) >> 3;
        in->have |= 56;
        return;
    }
    while (in->have <= 56) {
        if (in->next < in->end) in->word |= (uint64_t)*in->next++ << in->have;
        else in->invented++;
        in->have += 8;
    }
}

static inline unsigned take(struct bits *in, unsigned count) {
    unsigned value = (unsigned)(in->word & (((uint64_t)1 << count) - 1));
    in->word >>= count;
    in->have -= count;
    return value;
}

/* By the bits of an entry. Masked as the processor masks a shift, so that nothing stands between look-up and shift. */
static inline void skip(struct bits *in, uint32_t entry) {
    in->word >>= entry & 63;
    in->have -= entry & 63;
}

static int read_codes(struct bits *in, struct tables *tables) {
    static const uint8_t order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[320] = {0};
    refill(in);
    unsigned literals = take(in, 5) + 257, distances = take(in, 5) + 1, given = take(in, 4) + 4;
    if (literals > 286 || distances > 30) return 0;
    for (unsigned at = 0; at < given; at++) {
        refill(in);
        lengths[order[at]] = (uint8_t)take(in, 3);
    }
    uint32_t table[128];
    if (!make_table(table, 128, 7, lengths, 19, plain_entry)) return 0;
    memset(lengths, 0, sizeof lengths);
    for (unsigned at = 0; at < literals + distances;) {
        refill(in);
        uint32_t entry = table[in->word & 127];
        if (!(entry & 255)) return 0;
        skip(in, entry);
        unsigned symbol = entry >> 16, repeat, value = 0;
        if (symbol < 16) {
            lengths[at++] = (uint8_t)symbol;
            continue;
        }
        if (symbol == 16) {
            if (!at) return 0;
            value = lengths[at - 1];
            repeat = 3 + take(in, 2);
        } else repeat = symbol == 17 ? 3 + take(in, 3) : 11 + take(in, 7);
        if (at + repeat > literals + distances) return 0;
        memset(lengths + at, (int)value, repeat);
        at += repeat;
    }
    if (!lengths[256]) return 0;
    size_t rooms[2] = {sizeof tables->literal / 4, sizeof tables->distance / 4};
    if (!make_table(tables->literal, rooms[0], LITERAL_BITS, lengths, literals, literal_entry)) return 0;
    if (!make_table(tables->distance, rooms[1], DISTANCE_BITS, lengths + literals, distances, distance_entry)) return 0;
    pair_literals(tables->literal);
    return 1;
}

static int fixed_codes(struct tables *tables) {
    uint8_t lengths[288];
    for (int at = 0; at < 288; at++) lengths[at] = at < 144 ? 8 : at < 256 ? 9 : at < 280 ? 7 : 8;
    if (!make_table(tables->literal, sizeof tables->literal / 4, LITERAL_BITS, lengths, 288, literal_entry)) return 0;
    memset(lengths, 5, 32);
    pair_literals(tables->literal);
    return make_table(tables->distance, sizeof tables->distance / 4, DISTANCE_BITS, lengths, 32, distance_entry);
}

static inline uint32_t look_up(const struct bits *in, const uint32_t *table, unsigned bits) {
    return table[in->word & ((1u << bits) - 1)];
}

static inline uint32_t look_further(struct bits *in, const uint32_t *table, uint32_t entry) {
    if (!(entry & FURTHER)) return entry;
    skip(in, entry);
    return table[(entry >> 16) + (in->word & ((1u << (entry >> 8 & 15)) - 1))];
}

#define SLACK 320 /* room in which a whole round of the fast loop stays */

static inline void copy_match(unsigned char *out, size_t distance, size_t length) {
    const unsigned char *from = out - distance;
    unsigned char *stop = out + length;
    if (distance >= 8)
        do {
            memcpy(out, from, 8);
            out += 8, from += 8;
        } while (out < stop);
    else if (distance == 1) memset(out, *from, length);
    else
        while (out < stop) *out++ = *from++;
}

/* Goes on while there is room for a whole round at both ends, and no further than a symbol that is out of the ordinary;
 * in, in a copy that no store to out can change, so that it stays in registers. NULL where a distance is none. */
static inline unsigned char *inflate_fast(struct bits *source, const struct tables *tables, unsigned char *begin,
                                          unsigned char *out, unsigned char *end) {
    const uint32_t *literal = tables->literal, *far = tables->distance;
    struct bits in = *source;
    while (end - out >= SLACK && in.end - in.next >= 16) {
        refill(&in);
        uint32_t entry = look_up(&in, literal, LITERAL_BITS);
        if (entry & LITERAL) { /* three look-ups take at most 33 of at least 56 bits */
            uint16_t both = (uint16_t)(entry >> 16);
            memcpy(out, &both, 2);
            out += 1 + (entry >> 14 & 1);
            skip(&in, entry);
            entry = look_up(&in, literal, LITERAL_BITS);
            if (entry & LITERAL) {
                both = (uint16_t)(entry >> 16);
                memcpy(out, &both, 2);
                out += 1 + (entry >> 14 & 1);
                skip(&in, entry);
                entry = look_up(&in, literal, LITERAL_BITS);
                if (entry & LITERAL) {
                    both = (uint16_t)(entry >> 16);
                    memcpy(out, &both, 2);
                    out += 1 + (entry >> 14 & 1);
                    skip(&in, entry);
                    continue;
                }
            }
        }
        if (entry & (FURTHER | FINISHED) || !(entry & 255)) break;
        skip(&in, entry); /* of the 34 bits that are left at least, a length takes 16 */
        size_t length = (entry >> 16) + take(&in, entry >> 8 & 15);
        refill(&in);
        entry = look_further(&in, far, look_up(&in, far, DISTANCE_BITS));
        if (!(entry & 255)) return NULL;
        skip(&in, entry);
        size_t distance = (entry >> 16) + take(&in, entry >> 8 & 15);
        if (distance > (size_t)(out - begin)) return NULL;
        copy_match(out, distance, length);
        out += length;
    }
    *source = in;
    return out;
}

/* One block of codes; where it left off, or NULL where it is none. */
static unsigned char *inflate_codes(struct bits *in, const struct tables *tables, unsigned char *begin,
                                    unsigned char *out, unsigned char *end) {
    for (;;) {
        out = inflate_fast(in, tables, begin, out, end);
        if (!out) return NULL;
        refill(in);
        if (in->invented > 8) return NULL;
        uint32_t entry = look_further(in, tables->literal, look_up(in, tables->literal, LITERAL_BITS));
        if (!(entry & 255)) return NULL;
        skip(in, entry);
        if (entry & LITERAL) {
            unsigned count = 1 + (entry >> 14 & 1);
            if ((size_t)(end - out) < count) return NULL;
            *out++ = (unsigned char)(entry >> 16);
            if (count == 2) *out++ = (unsigned char)(entry >> 24);
            continue;
        }
        if (entry & FINISHED) return out;
        size_t length = (entry >> 16) + take(in, entry >> 8 & 15);
        refill(in);
        entry = look_further(in, tables->distance, look_up(in, tables->distance, DISTANCE_BITS));
        if (!(entry & 255)) return NULL;
        skip(in, entry);
        size_t distance = (entry >> 16) + take(in, entry >> 8 & 15);
        if (distance > (size_t)(out - begin) || length > (size_t)(end - out)) return NULL;
        for (const unsigned char *from = out - distance; length; length--) *out++ = *from++;
    }
}

/* How many bytes came out, or -1 where this is no DEFLATE stream that fits. *used: how many went in. */
static int64_t inflate_raw(const unsigned char *data, size_t size, unsigned char *out, size_t room, size_t *used) {
    struct bits in = {data, data + size, 0, 0, 0};
    struct tables tables;
    unsigned char *at = out, *end = out + room;
    for (int last = 0; !last;) {
        refill(&in);
        last = (int)take(&in, 1);
        unsigned kind = take(&in, 2);
        if (kind == 0) {
            take(&in, in.have & 7);
            const unsigned char *from = in.next - (in.have / 8 - in.invented);
            if (in.invented > in.have / 8 || in.end - from < 4) return -1;
            size_t length = from[0] | (size_t)from[1] << 8, check = from[2] | (size_t)from[3] << 8;
            if ((length ^ check) != 0xFFFF || (size_t)(in.end - from) < 4 + length || (size_t)(end - at) < length) return -1;
            memcpy(at, from + 4, length);
            at += length;
            in = (struct bits){from + 4 + length, data + size, 0, 0, 0};
            continue;
        }
        if (kind == 3 || !(kind == 1 ? fixed_codes(&tables) : read_codes(&in, &tables))) return -1;
        at = inflate_codes(&in, &tables, out, at, end);
        if (!at) return -1;
    }
    if (in.invented > in.have / 8) return -1; /* it ended only because zeros were read behind its end */
    *used = (size_t)(in.next - data) - (in.have / 8 - in.invented);
    return at - out;
}

#endif
