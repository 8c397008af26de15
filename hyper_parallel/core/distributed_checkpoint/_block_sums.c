/* SPDX-License-Identifier: Apache-2.0
 *
 * XXH3 of blocks of 4096 bytes, faster than memory; a box of a stored array read and compared with such sums on its way
 * to where it belongs; and a copy of much memory. checksum.py and data_file.py do the same in Python where this is not
 * built.
 * Nothing here holds Python's lock while it works.
 */
#define PY_SSIZE_T_CLEAN
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers are read as they lie in memory, lowest byte first"
#endif

/* --- XXH3-64 with seed 0 and the secret of its specification, of 4096 bytes
 *
 * Eight lanes take up four groups of 16 stripes of 64 bytes, each stripe with a part of the secret, and are scrambled
 * between two groups. The very last stripe has a part of its own.
 */
#define BLOCK 4096
#define LANES 8
#define GROUPS 4
#define STRIPES 16 /* of a group */
#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u

static const uint64_t start_of_lanes[LANES] = {
    0xC2B2AE3D,         PRIME64_1,  0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME32_1,
};
static const uint64_t secret[24] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};

static uint64_t keys[GROUPS][STRIPES][LANES] __attribute__((aligned(64))); /* parts of the secret for each stripe */
static uint64_t scramble_key[LANES], merge_key[LANES];

static void fill_keys(void) {
    const uint8_t *bytes = (const uint8_t *)secret;
    for (int group = 0; group < GROUPS; group++)
        for (int stripe = 0; stripe < STRIPES; stripe++) memcpy(keys[group][stripe], bytes + 8 * stripe, 8 * LANES);
    memcpy(keys[GROUPS - 1][STRIPES - 1], bytes + 121, 8 * LANES);
    memcpy(scramble_key, bytes + 128, 8 * LANES);
    memcpy(merge_key, bytes + 11, 8 * LANES);
}

static uint64_t merged(const uint64_t *lanes) {
    uint64_t sum = BLOCK * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) {
        unsigned __int128 product = lanes[i] ^ merge_key[i];
        product *= lanes[i + 1] ^ merge_key[i + 1];
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

static uint64_t plainly(const uint8_t *block) {
    uint64_t lanes[LANES];
    memcpy(lanes, start_of_lanes, sizeof lanes);
    for (int group = 0; group < GROUPS; group++) {
        for (int i = 0; i < LANES && group > 0; i++)
            lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ scramble_key[i]) * PRIME32_1;
        for (int stripe = 0; stripe < STRIPES; stripe++, block += 8 * LANES)
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) {
                uint64_t number, mixed;
                memcpy(&number, block + 8 * i, 8);
                mixed = number ^ keys[group][stripe][i];
                lanes[i ^ 1] += number;
                lanes[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
            }
    }
    return merged(lanes);
}

static uint64_t plainly_carried(const uint8_t *block, uint8_t *to) {
    memcpy(to, block, BLOCK);
    return plainly(block);
}

typedef uint64_t (*Sum)(const uint8_t *block);
typedef uint64_t (*Carry)(const uint8_t *block, uint8_t *to); /* also copies the block */
static struct { const char *name; Sum sum; Carry carry; } ways[2] = {{"plain", plainly, plainly_carried}};
static int way_count = 1; /* of these that this processor has, the best one last */

#if defined(__x86_64__)
#include <immintrin.h>

#define LOAD(from, half) _mm256_loadu_si256((const __m256i *)(from) + (half))
#define WITH_AVX2 __attribute__((target("avx2")))

/* The same, four lanes in a register. */
WITH_AVX2 static inline __m256i take_up(__m256i lanes, __m256i numbers, __m256i key) {
    __m256i mixed = numbers ^ key, products = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i neighbours = _mm256_shuffle_epi32(numbers, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(products, neighbours));
}

WITH_AVX2 static inline __m256i scrambled(__m256i lanes, __m256i key) {
    __m256i prime = _mm256_set1_epi64x(PRIME32_1), mixed = lanes ^ _mm256_srli_epi64(lanes, 47) ^ key;
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

/* With ``to`` the block goes there as well, past the cache, which has better things to hold: a copy that waits for memory
 * leaves the processor all the time that the sum needs. */
WITH_AVX2 static inline __attribute__((always_inline)) uint64_t taken_up(const uint8_t *block, uint8_t *to) {
    __m256i a = LOAD(start_of_lanes, 0), b = LOAD(start_of_lanes, 1);
    for (int group = 0; group < GROUPS; group++) {
        if (group > 0) a = scrambled(a, LOAD(scramble_key, 0)), b = scrambled(b, LOAD(scramble_key, 1));
#pragma GCC unroll 4
        for (int stripe = 0; stripe < STRIPES; stripe++, block += 8 * LANES) {
            const uint64_t *key = keys[group][stripe];
            __m256i first = LOAD(block, 0), second = LOAD(block, 1);
            if (to != NULL) {
                _mm256_stream_si256((__m256i *)to, first), _mm256_stream_si256((__m256i *)to + 1, second);
                to += 8 * LANES;
            }
            a = take_up(a, first, LOAD(key, 0)), b = take_up(b, second, LOAD(key, 1));
        }
    }
    uint64_t lanes[LANES];
    _mm256_storeu_si256((__m256i *)lanes, a), _mm256_storeu_si256((__m256i *)lanes + 1, b);
    return merged(lanes);
}

WITH_AVX2 static uint64_t by_avx2(const uint8_t *block) { return taken_up(block, NULL); }

WITH_AVX2 static uint64_t carried_by_avx2(const uint8_t *block, uint8_t *to) {
    return (uintptr_t)to % 32 ? plainly_carried(block, to) : taken_up(block, to);
}

#define AHEAD 2048 /* bytes that are asked for before they are needed */

/* Past the cache: stores that went through it would first read what they write over. */
WITH_AVX2 static void copied_by_avx2(uint8_t *to, const uint8_t *from, size_t size) {
    size_t head = -(uintptr_t)to % 32;
    if (size < AHEAD + head) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    size_t at = head;
    for (; at + 128 <= size; at += 128) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_NTA); /* behind the end it does nothing */
        _mm_prefetch((const char *)from + at + AHEAD + 64, _MM_HINT_NTA);
        __m256i a = LOAD(from + at, 0), b = LOAD(from + at, 1), c = LOAD(from + at, 2), d = LOAD(from + at, 3);
        __m256i *out = (__m256i *)(to + at);
        _mm256_stream_si256(out, a), _mm256_stream_si256(out + 1, b);
        _mm256_stream_si256(out + 2, c), _mm256_stream_si256(out + 3, d);
    }
    memcpy(to + at, from + at, size - at);
    _mm_sfence();
}

static void copy_much(uint8_t *to, const uint8_t *from, size_t size) {
    if (way_count > 1)
        copied_by_avx2(to, from, size);
    else
        memcpy(to, from, size);
}

static void choose(void) {
    if (!__builtin_cpu_supports("avx2")) return;
    ways[1].name = "avx2", ways[1].sum = by_avx2, ways[1].carry = carried_by_avx2;
    way_count = 2;
}

static void settle(void) { _mm_sfence(); } /* what went past the cache is seen by all */
#else
static void copy_much(uint8_t *to, const uint8_t *from, size_t size) { memcpy(to, from, size); }
static void choose(void) {}
static void settle(void) {}
#endif

/* The sum of a block, which counts as filled up with zeros if it is shorter. */
static uint64_t sum_of(Sum way, const uint8_t *data, int64_t size) {
    if (size >= BLOCK) return way(data);
    uint8_t padded[BLOCK] = {0};
    memcpy(padded, data, (size_t)size);
    return way(padded);
}

/* --- a box of an array in a file
 *
 * The box is made of runs: bytes that follow each other both in the file and in memory. What is compared is looked at in
 * a window, a part of the file mapped as memory, so that nothing is copied but to where it belongs; or, where a box has
 * only few bytes of its part of the file, or the system maps none, it is read into a buffer that stays in the cache.
 * Whole blocks of long runs are compared on their way from there. Short runs are looked at together, with what lies
 * between two if that is no more than a block. Long ones that are not compared are read to where they belong.
 */
#define STEP (128 * 1024) /* looked at in one go; as a buffer it stays in the cache */
#define WINDOW (4 * 1024 * 1024)
#define LONG (2 * BLOCK)
#define MOST_DIMS 64
#define SPARSE 16 /* one byte of so many, or fewer, are not worth a window */

enum { FINE, FAILED, ENDED, DAMAGED };

typedef struct {
    int fd;
    int64_t start, nbytes; /* of the chunk in the file; all other positions count from its start */
    const uint64_t *sums;  /* of its blocks from the first one that is needed; NULL: do not compare */
    int64_t first_block, unit; /* unit: reading begins and ends at multiples of this */
    int64_t bytes_read, bad_block;
    int ndim; /* dims over which runs are spread, the last one fastest */
    int64_t run, counts[MOST_DIMS], strides[MOST_DIMS], steps[MOST_DIMS]; /* strides in the file, steps in memory */
    uint8_t *stage;
    int maps; /* whether it looks through windows */
    uint8_t *volatile window; /* volatile: known also after a jump out of a signal */
    volatile int64_t window_start, window_size; /* start: in the file */
} Reader;

typedef struct { int64_t from; uint8_t *to; int64_t index[MOST_DIMS]; } Run;

static int64_t down(const Reader *r, int64_t at) { return at - at % r->unit; }

static int64_t up(const Reader *r, int64_t at) {
    int64_t next = down(r, at + r->unit - 1);
    return next < r->nbytes ? next : r->nbytes;
}

/* The next run; 0 when there is none. */
static int advance(const Reader *r, Run *run) {
    for (int d = r->ndim - 1; d >= 0; d--) {
        run->from += r->strides[d], run->to += r->steps[d];
        if (++run->index[d] < r->counts[d]) return 1;
        run->from -= r->counts[d] * r->strides[d], run->to -= r->counts[d] * r->steps[d];
        run->index[d] = 0;
    }
    return 0;
}

static int fill(Reader *r, int64_t at, uint8_t *to, int64_t size) {
    while (size > 0) {
        ssize_t got = pread(r->fd, to, (size_t)size, (off_t)(r->start + at));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return FAILED;
        if (got == 0) return ENDED;
        at += got, to += got, size -= got, r->bytes_read += got;
    }
    return FINE;
}

static void close_window(Reader *r) {
    if (r->window != NULL) munmap(r->window, (size_t)r->window_size);
    r->window = NULL;
}

/* Opens a window from a position to that of another or beyond; 0 if the system does not. */
static int open_window(Reader *r, int64_t at, int64_t end) {
    int64_t page = sysconf(_SC_PAGESIZE), start = (r->start + at) / page * page, behind = start + WINDOW;
    if (behind < r->start + end) behind = r->start + end;
    if (behind > r->start + r->nbytes) behind = r->start + r->nbytes;
    close_window(r);
    void *window = mmap(NULL, (size_t)(behind - start), PROT_READ, MAP_SHARED, r->fd, (off_t)start);
    if (window == MAP_FAILED) return 0;
    r->window_start = start, r->window_size = behind - start, r->window = window;
    return 1;
}

/* What is in the file from one position to another, no more than STEP and two blocks; NULL if it cannot be had. */
static const uint8_t *look(Reader *r, int64_t at, int64_t end, int *state) {
    *state = FINE;
    if (r->maps) {
        int64_t first = r->start + at, behind = r->start + end;
        int seen = r->window != NULL && r->window_start <= first && behind <= r->window_start + r->window_size;
        if (seen || (r->maps = open_window(r, at, end))) {
            r->bytes_read += end - at;
            return r->window + (first - r->window_start);
        }
    }
    *state = fill(r, at, r->stage, end - at);
    return *state == FINE ? r->stage : NULL;
}

/* Compares the blocks from one position to another, both of which are ends of blocks. */
static int compare(Reader *r, const uint8_t *data, int64_t begin, int64_t end) {
    if (r->sums == NULL) return FINE;
    for (int64_t at = begin; at < end; at += BLOCK)
        if (sum_of(ways[way_count - 1].sum, data + (at - begin), end - at) != r->sums[at / BLOCK - r->first_block]) {
            r->bad_block = at / BLOCK;
            return DAMAGED;
        }
    return FINE;
}

/* Takes a part of a run, from one position to another, out of data, which is what is in the file from ``at`` on, where a
 * block begins. */
static int deliver(Reader *r, const uint8_t *data, int64_t at, int64_t from, int64_t end, uint8_t *to) {
    for (; at < end; at += BLOCK, data += BLOCK) {
        int64_t size = r->nbytes - at < BLOCK ? r->nbytes - at : BLOCK, first = from > at ? from : at, behind = at + size;
        uint64_t sum;
        if (from <= at && behind <= end && size == BLOCK)
            sum = ways[way_count - 1].carry(data, to + (at - from));
        else {
            memcpy(to + (first - from), data + (first - at), (size_t)((end < behind ? end : behind) - first));
            sum = sum_of(ways[way_count - 1].sum, data, size);
        }
        if (sum != r->sums[at / BLOCK - r->first_block]) {
            r->bad_block = at / BLOCK;
            return DAMAGED;
        }
    }
    return FINE;
}

static int take_long(Reader *r, const Run *run) {
    if (r->sums == NULL) return fill(r, run->from, run->to, r->run);
    int64_t end = run->from + r->run, next;
    int state = FINE;
    for (int64_t from = run->from; state == FINE && from < end; from = next) {
        int64_t at = down(r, from);
        next = end - at < STEP ? end : at + STEP;
        const uint8_t *data = look(r, at, up(r, next), &state);
        if (data != NULL) state = deliver(r, data, at, from, next, run->to + (from - run->from));
    }
    return state;
}

/* As many runs as the buffer has room for, from ``run`` on, which is moved behind them; ``more``: whether one is left. */
static int take_together(Reader *r, Run *run, int *more) {
    Run ahead = *run;
    int64_t begin = down(r, run->from), last = run->from + r->run, end = up(r, last), count = 1;
    for (; advance(r, &ahead); count++) {
        int64_t next = up(r, ahead.from + r->run);
        if (ahead.from < last || down(r, ahead.from) - end > BLOCK || next - begin > STEP) break;
        last = ahead.from + r->run, end = next;
    }
    int state;
    const uint8_t *data = look(r, begin, end, &state);
    if (data != NULL) state = compare(r, data, begin, end);
    for (*more = 1; state == FINE && count > 0; count--) {
        memcpy(run->to, data + (run->from - begin), (size_t)r->run);
        *more = advance(r, run);
    }
    return state;
}

static int take_box(Reader *r, int64_t from, uint8_t *to) {
    Run run = {.from = from, .to = to};
    int state = FINE, more = 1;
    while (state == FINE && more)
        if (r->run >= LONG) {
            state = take_long(r, &run);
            more = advance(r, &run);
        } else
            state = take_together(r, &run, &more);
    settle();
    return state;
}

/* --- windows onto files that end too early, or whose disk fails
 *
 * There the system sends SIGBUS, which would end the process. A thread that looks through a window comes back from it
 * instead and reads the ordinary way, which says what is wrong. Everybody else's SIGBUS is left to who had it before.
 */
static __thread sigjmp_buf *volatile way_back;
static struct sigaction had_before;
static pthread_mutex_t change = PTHREAD_MUTEX_INITIALIZER;
static int lookers;

static void on_bus_error(int number, siginfo_t *told, void *context) {
    if (way_back != NULL) siglongjmp(*way_back, 1);
    if (had_before.sa_flags & SA_SIGINFO)
        had_before.sa_sigaction(number, told, context);
    else if (had_before.sa_handler != SIG_DFL && had_before.sa_handler != SIG_IGN)
        had_before.sa_handler(number);
    else
        sigaction(SIGBUS, &had_before, NULL); /* what caused it is done again, and ends as it would have */
}

/* Counts the threads that look through windows; the handler is there as long as there is one. */
static void count_lookers(int more) {
    pthread_mutex_lock(&change);
    int others = lookers;
    lookers += more;
    if (others == 0) {
        struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        sigaction(SIGBUS, &ours, &had_before);
    } else if (lookers == 0) {
        struct sigaction now;
        sigaction(SIGBUS, NULL, &now);
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) sigaction(SIGBUS, &had_before, NULL);
    }
    pthread_mutex_unlock(&change);
}

static int take_box_safely(Reader *r, int64_t from, uint8_t *to) {
    sigjmp_buf here;
    int state;
    if (!r->maps) return take_box(r, from, to);
    count_lookers(1);
    if (sigsetjmp(here, 1) == 0) {
        way_back = &here;
        state = take_box(r, from, to);
        way_back = NULL;
    } else {
        way_back = NULL;
        r->maps = 0, r->bytes_read = 0;
        state = take_box(r, from, to);
    }
    count_lookers(-1);
    close_window(r);
    return state;
}

/* --- Python */

static PyObject *py_block_sums(PyObject *self, PyObject *args) {
    Py_buffer data, sums;
    int way = way_count - 1;
    if (!PyArg_ParseTuple(args, "y*w*|i:block_sums", &data, &sums, &way)) return NULL;
    Py_ssize_t blocks = (data.len + BLOCK - 1) / BLOCK;
    int fits = sums.len == blocks * 8 && way >= 0 && way < way_count;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < blocks; i++)
            ((uint64_t *)sums.buf)[i] = sum_of(ways[way].sum, (uint8_t *)data.buf + i * BLOCK, data.len - i * BLOCK);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "block_sums: expected eight bytes a block and a way below %d", way_count);
    PyBuffer_Release(&data);
    PyBuffer_Release(&sums);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_copy(PyObject *self, PyObject *args) {
    Py_buffer to, from;
    if (!PyArg_ParseTuple(args, "w*y*:copy", &to, &from)) return NULL;
    int fits = to.len == from.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_much(to.buf, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "copy: %zd bytes do not fit into %zd", from.len, to.len);
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

/* What the box is made of; -1 with an error unless it lies in the chunk and its sums are there. */
static int lay_out(Reader *r, int64_t from, PyObject *strides, const Py_buffer *out, const Py_buffer *sums) {
    int64_t last = from, in_file[MOST_DIMS];
    if (out->ndim > MOST_DIMS || PyTuple_GET_SIZE(strides) != out->ndim) goto wrong;
    for (int d = 0; d < out->ndim; d++) {
        in_file[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d));
        if (in_file[d] == -1 && PyErr_Occurred()) return -1;
        int64_t way;
        if (in_file[d] < 0 || __builtin_mul_overflow(in_file[d], out->shape[d] - 1, &way) ||
            __builtin_add_overflow(last, way, &last))
            goto wrong;
    }
    if (from < 0 || r->start < 0 || last < from || last > r->nbytes - out->itemsize) goto wrong;
    int64_t begin = from / BLOCK, end = (last + out->itemsize - 1) / BLOCK;
    if (r->sums != NULL && (begin < r->first_block || end - r->first_block >= sums->len / 8)) goto wrong;
    r->run = out->itemsize, r->ndim = out->ndim;
    for (; r->ndim > 0; r->ndim--) { /* dims in which the bytes go on in both are part of the run */
        int d = r->ndim - 1;
        if (out->shape[d] != 1 && (in_file[d] != r->run || out->strides[d] != r->run)) break;
        r->run *= out->shape[d];
    }
    for (int d = 0; d < r->ndim; d++)
        r->counts[d] = out->shape[d], r->strides[d] = in_file[d], r->steps[d] = out->strides[d];
    int64_t span = last + out->itemsize - from;
    r->maps = r->sums != NULL && span > STEP && out->len > span / SPARSE;
    return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "read_box: the box is not within the chunk, or its sums are not all there");
    return -1;
}

static PyObject *box_read(Reader *r, int64_t from, const Py_buffer *out) {
    if ((r->stage = PyMem_RawMalloc(STEP)) == NULL) return PyErr_NoMemory();
    int state;
    Py_BEGIN_ALLOW_THREADS
    state = take_box_safely(r, from, out->buf);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(r->stage);
    if (state == FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    if (state == ENDED) return PyErr_Format(PyExc_EOFError, "the file ends within the chunk");
    return Py_BuildValue("LL", (long long)r->bytes_read, (long long)(state == DAMAGED ? r->bad_block : -1));
}

static PyObject *py_read_box(PyObject *self, PyObject *args) {
    Reader r = {.unit = 1};
    long long start, nbytes, from, first;
    PyObject *strides, *array, *expected, *result = NULL;
    Py_buffer out, sums = {0};
    if (!PyArg_ParseTuple(args, "iLLLO!OOL:read_box", &r.fd, &start, &nbytes, &from, &PyTuple_Type, &strides, &array,
                          &expected, &first))
        return NULL;
    r.start = start, r.nbytes = nbytes, r.first_block = first;
    if (PyObject_GetBuffer(array, &out, PyBUF_STRIDES | PyBUF_WRITABLE)) return NULL;
    if (expected != Py_None) {
        if (PyObject_GetBuffer(expected, &sums, PyBUF_SIMPLE)) goto done;
        r.sums = sums.buf, r.unit = BLOCK;
    }
    if (out.len == 0)
        result = Py_BuildValue("ii", 0, -1);
    else if (lay_out(&r, from, strides, &out, &sums) == 0)
        result = box_read(&r, from, &out);
done:
    if (sums.obj != NULL) PyBuffer_Release(&sums);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"block_sums", py_block_sums, METH_VARARGS,
     "block_sums(data, sums, way): fills sums with that of each block, by one of ``ways``, the last if none is given."},
    {"copy", py_copy, METH_VARARGS, "copy(out, data): copies bytes that do not overlap."},
    {"read_box", py_read_box, METH_VARARGS,
     "read_box(fd, start, nbytes, offset, strides, out, sums, first_block) -> (bytes read, damaged block or -1)\n\n"
     "Fills the array with the box of a chunk that begins at an offset and has these strides, both in bytes."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hyper_parallel.core.distributed_checkpoint._block_sums",
    .m_doc = "Checksums of blocks, compiled.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__block_sums(void) {
    fill_keys();
    choose();
    PyObject *made = PyModule_Create(&module), *names = PyTuple_New(way_count);
    if (made == NULL || names == NULL) return NULL;
    for (int i = 0; i < way_count; i++) PyTuple_SET_ITEM(names, i, PyUnicode_FromString(ways[i].name));
    return PyModule_AddObjectRef(made, "ways", names) ? NULL : made;
}
