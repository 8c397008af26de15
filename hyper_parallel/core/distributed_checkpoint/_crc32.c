/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 as zlib computes it, of blocks of 4096 bytes, at the speed of memory; and a box of a stored array read and
 * compared with such sums while it is in the cache. checksum.py and data_file.py do the same in Python where this is
 * not built. Nothing here holds Python's lock while it works.
 */
#define PY_SSIZE_T_CLEAN
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define BLOCK 4096
#define POLYNOMIAL 0xEDB88320u /* bit i is the coefficient of x^(31-i), as in everything below */

/* --- eight bytes a step, by tables: for short rests, and for processors without anything better */

static uint32_t table[8][256]; /* table[k][b]: the byte b, followed by k zero bytes */

static uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? POLYNOMIAL : 0); }

static void fill_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++) sum = times_x(sum);
        table[0][byte] = sum;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 255];
}

/* All of these take and give the sum without the inversion at both ends. */
static uint32_t by_table(uint32_t sum, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t first = sum ^ (data[0] | data[1] << 8 | data[2] << 16 | (uint32_t)data[3] << 24);
        sum = table[7][first & 255] ^ table[6][first >> 8 & 255] ^ table[5][first >> 16 & 255] ^ table[4][first >> 24] ^
              table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    }
    for (; size > 0; data++, size--) sum = (sum >> 8) ^ table[0][(sum ^ *data) & 255];
    return sum;
}

typedef uint32_t (*Update)(uint32_t sum, const uint8_t *data, size_t size);
typedef uint32_t (*Carry)(uint32_t sum, const uint8_t *data, size_t size, uint8_t *to);
static Update update = by_table;
static struct { const char *name; Update update; } ways[3]; /* that this processor has, the best one last */
static int way_count;

static void offer(const char *name, Update with) {
    ways[way_count].name = name, ways[way_count++].update = with;
    update = with;
}

/* The sum of bytes that are copied at the same time. */
static uint32_t carry_by_copy(uint32_t sum, const uint8_t *data, size_t size, uint8_t *to) {
    memcpy(to, data, size);
    return update(sum, data, size);
}

static Carry carry = carry_by_copy;

/* --- x86: multiplication of polynomials
 *
 * The sum is the data's polynomial mod P. 16 bytes (A, B), eight each, that are followed by D more bits count as
 * A x^(D+64) + B x^D, so they can be replaced by A (x^(D+64) mod P) + B (x^D mod P), added to the 16 bytes D bits later.
 * The product of two reflected 64-bit numbers comes out one bit low, which is why the powers below are one less. Eight
 * lanes of 16 bytes are folded onto the next 128 bytes until less is left, then onto one lane, whose own sum is what
 * the tables make of it.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LANES 8
#define STRIDE (16 * LANES)

static uint64_t factors[LANES + 1][2]; /* [n]: those of A and B for a fold onto the lane that is n lanes later */

static uint64_t power(int n) {
    uint32_t a = 0x80000000u; /* x^0 */
    while (n-- > 0) a = times_x(a);
    return (uint64_t)a << 32; /* as a reflected polynomial of degree 63 */
}

static void fill_factors(void) {
    for (int n = 1; n <= LANES; n++) factors[n][0] = power(128 * n + 64 - 1), factors[n][1] = power(128 * n - 1);
}

#define INLINED static inline __attribute__((always_inline))
#define WITH_MULTIPLICATION __attribute__((target("pclmul,sse4.1")))
#define WITH_WIDE_MULTIPLICATION __attribute__((target("vpclmulqdq,pclmul,avx2")))

/* Inlined, so that each caller has them in its own encoding of instructions. */
WITH_MULTIPLICATION INLINED __m128i folded(__m128i lane, __m128i by, __m128i onto) {
    __m128i a = _mm_clmulepi64_si128(lane, by, 0x00), b = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(a, b), onto);
}

/* The sum of what is in the lanes: each half of them is folded onto the next, until one is left. */
WITH_MULTIPLICATION INLINED uint32_t sum_of_lanes(__m128i *lanes) {
    uint8_t bytes[16];
#pragma GCC unroll 3
    for (int half = LANES / 2; half > 0; lanes += half, half /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < half; i++)
            lanes[half + i] = folded(lanes[i], _mm_loadu_si128((const __m128i *)factors[half]), lanes[half + i]);
    _mm_storeu_si128((__m128i *)bytes, *lanes);
    return by_table(0, bytes, 16);
}

WITH_MULTIPLICATION static uint32_t by_multiplication(uint32_t sum, const uint8_t *data, size_t size) {
    if (size < STRIDE) return by_table(sum, data, size);
    __m128i by = _mm_loadu_si128((const __m128i *)factors[LANES]), lanes[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) lanes[i] = _mm_loadu_si128((const __m128i *)data + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)sum));
    for (data += STRIDE, size -= STRIDE; size >= STRIDE; data += STRIDE, size -= STRIDE)
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) lanes[i] = folded(lanes[i], by, _mm_loadu_si128((const __m128i *)data + i));
    return by_table(sum_of_lanes(lanes), data, size);
}

WITH_WIDE_MULTIPLICATION INLINED __m256i folded_pair(__m256i pair, __m256i by, __m256i onto) {
    __m256i a = _mm256_clmulepi64_epi128(pair, by, 0x00), b = _mm256_clmulepi64_epi128(pair, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(a, b), onto);
}

/* The same, two lanes in one register. */
WITH_WIDE_MULTIPLICATION static uint32_t by_wide_multiplication(uint32_t sum, const uint8_t *data, size_t size) {
    if (size < STRIDE) return by_table(sum, data, size);
    __m256i by = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)factors[LANES])), pairs[LANES / 2];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) pairs[i] = _mm256_loadu_si256((const __m256i *)data + i);
    pairs[0] = _mm256_xor_si256(pairs[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)sum)));
    for (data += STRIDE, size -= STRIDE; size >= STRIDE; data += STRIDE, size -= STRIDE)
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++)
            pairs[i] = folded_pair(pairs[i], by, _mm256_loadu_si256((const __m256i *)data + i));
    return by_table(sum_of_lanes((__m128i *)pairs), data, size);
}

/* The same for bytes that go elsewhere, past the cache, which has better things to hold: the sum costs next to nothing,
 * as the processor would only wait for memory. */
WITH_WIDE_MULTIPLICATION static uint32_t carry_past_cache(uint32_t sum, const uint8_t *data, size_t size, uint8_t *to) {
    if (size % STRIDE || (uintptr_t)to % 32) return carry_by_copy(sum, data, size, to);
    __m256i by = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)factors[LANES])), pairs[LANES / 2];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
        pairs[i] = _mm256_loadu_si256((const __m256i *)data + i);
        _mm256_stream_si256((__m256i *)to + i, pairs[i]);
    }
    pairs[0] = _mm256_xor_si256(pairs[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)sum)));
    for (size_t at = STRIDE; at < size; at += STRIDE)
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            __m256i next = _mm256_loadu_si256((const __m256i *)(data + at) + i);
            _mm256_stream_si256((__m256i *)(to + at) + i, next);
            pairs[i] = folded_pair(pairs[i], by, next);
        }
    return sum_of_lanes((__m128i *)pairs);
}

static void choose(void) {
    fill_factors();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return;
    offer("pclmulqdq", by_multiplication);
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("vpclmulqdq")) return;
    offer("vpclmulqdq", by_wide_multiplication);
    carry = carry_past_cache;
}

static void settle(void) { _mm_sfence(); } /* what went past the cache is seen by all */

/* --- ARM has an instruction for eight bytes. Untested on hardware. */
#elif defined(__ARM_FEATURE_CRC32) && defined(__AARCH64EL__)
#include <arm_acle.h>

static uint32_t by_instruction(uint32_t sum, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t next;
        memcpy(&next, data, 8);
        sum = __crc32d(sum, next);
    }
    for (; size > 0; data++, size--) sum = __crc32b(sum, *data);
    return sum;
}

static void choose(void) { offer("crc32d", by_instruction); }
static void settle(void) {}
#else
static void choose(void) {}
static void settle(void) {}
#endif

static uint32_t crc(const uint8_t *data, size_t size) { return ~update(~0u, data, size); }

/* --- a box of an array in a file
 *
 * The box is made of runs: bytes that follow each other both in the file and in memory. What is compared goes through a
 * buffer that stays in the cache, and is compared on its way from there; what is not is read to where it belongs.
 * Short runs are read together, and with them what lies between two of them if that is no more than a block.
 */
#define STAGE (128 * 1024)
#define LONG (2 * BLOCK) /* runs from here on are compared on their way, shorter ones before */
#define MOST_DIMS 64

enum { FINE, FAILED, ENDED, DAMAGED };

typedef struct {
    int fd;
    int64_t start, nbytes; /* of the chunk in the file; all other positions count from its start */
    const uint32_t *sums;  /* of its blocks from the first one that is needed; NULL: do not compare */
    int64_t first_block, unit; /* unit: reading begins and ends at multiples of this */
    int64_t bytes_read, bad_block;
    int ndim; /* dims over which runs are spread, the last one fastest */
    int64_t run, counts[MOST_DIMS], strides[MOST_DIMS], steps[MOST_DIMS]; /* strides in the file, steps in memory */
    uint8_t *stage;
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

static int checked(Reader *r, int64_t block, uint32_t sum) {
    if (~sum == r->sums[block - r->first_block]) return FINE;
    r->bad_block = block;
    return DAMAGED;
}

static int64_t block_size(const Reader *r, int64_t block) {
    int64_t rest = r->nbytes - block * BLOCK;
    return rest < BLOCK ? rest : BLOCK;
}

/* Compares all blocks that are in the buffer, which begins at a block. */
static int compare(Reader *r, int64_t begin, int64_t end) {
    int state = FINE;
    for (int64_t block = begin / BLOCK; state == FINE && block * BLOCK < end; block++)
        state = checked(r, block, update(~0u, r->stage + (block * BLOCK - begin), (size_t)block_size(r, block)));
    return state;
}

/* Takes bytes out of the buffer, which begins at a block, and compares the blocks that they are in. */
static int deliver(Reader *r, int64_t begin, int64_t from, int64_t end, uint8_t *to) {
    int state = FINE;
    for (int64_t block = from / BLOCK; state == FINE && block * BLOCK < end; block++) {
        int64_t at = block * BLOCK, size = block_size(r, block);
        const uint8_t *data = r->stage + (at - begin);
        if (from <= at && at + size <= end)
            state = checked(r, block, carry(~0u, data, (size_t)size, to + (at - from)));
        else {
            int64_t first = from > at ? from : at, last = end < at + size ? end : at + size;
            memcpy(to + (first - from), data + (first - at), (size_t)(last - first));
            state = checked(r, block, update(~0u, data, (size_t)size));
        }
    }
    return state;
}

/* One run, in as many steps as it needs. */
static int take_long(Reader *r, const Run *run) {
    if (r->sums == NULL) return fill(r, run->from, run->to, r->run);
    int64_t end = run->from + r->run, next;
    int state = FINE;
    for (int64_t from = run->from; state == FINE && from < end; from = next) {
        int64_t begin = down(r, from);
        next = end - begin < STAGE ? end : begin + STAGE;
        state = fill(r, begin, r->stage, up(r, next) - begin);
        if (state == FINE) state = deliver(r, begin, from, next, run->to + (from - run->from));
    }
    return state;
}

/* As many runs as the buffer has room for, from ``run`` on, which is moved behind them; ``more``: whether one is left. */
static int take_together(Reader *r, Run *run, int *more) {
    Run ahead = *run;
    int64_t begin = down(r, run->from), last = run->from + r->run, end = up(r, last), count = 1;
    for (; advance(r, &ahead); count++) {
        int64_t next = up(r, ahead.from + r->run);
        if (ahead.from < last || down(r, ahead.from) - end > BLOCK || next - begin > STAGE) break;
        last = ahead.from + r->run, end = next;
    }
    int state = fill(r, begin, r->stage, end - begin), on_the_way = r->sums != NULL && r->run >= LONG;
    if (state == FINE && r->sums != NULL && !on_the_way) state = compare(r, begin, end);
    for (*more = 1; state == FINE && count > 0; count--) {
        if (on_the_way)
            state = deliver(r, begin, run->from, run->from + r->run, run->to);
        else
            memcpy(run->to, r->stage + (run->from - begin), (size_t)r->run);
        *more = advance(r, run);
    }
    return state;
}

static int take_box(Reader *r, int64_t from, uint8_t *to) {
    Run run = {.from = from, .to = to};
    int state = FINE, more = 1, apart = r->ndim > 0 && r->strides[r->ndim - 1] - r->run >= 2 * BLOCK;
    while (state == FINE && more)
        if (r->run > STAGE - 2 * BLOCK || (r->run >= LONG && apart)) {
            state = take_long(r, &run);
            more = advance(r, &run);
        } else
            state = take_together(r, &run, &more);
    settle();
    return state;
}

/* --- Python */

static PyObject *py_crc32(PyObject *self, PyObject *args) {
    Py_buffer view;
    int number = way_count - 1;
    if (!PyArg_ParseTuple(args, "y*|i:crc32", &view, &number)) return NULL;
    uint32_t sum = 0;
    int known = number >= 0 && number < way_count;
    Py_BEGIN_ALLOW_THREADS
    if (known) sum = ~ways[number].update(~0u, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return known ? PyLong_FromUnsignedLong(sum) : PyErr_Format(PyExc_ValueError, "crc32: there is no way %d", number);
}

static PyObject *py_block_sums(PyObject *self, PyObject *args) {
    Py_buffer data, sums;
    if (!PyArg_ParseTuple(args, "y*w*:block_sums", &data, &sums)) return NULL;
    Py_ssize_t blocks = (data.len + BLOCK - 1) / BLOCK;
    int fits = sums.len == blocks * 4;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < blocks; i++) {
            Py_ssize_t rest = data.len - i * BLOCK;
            ((uint32_t *)sums.buf)[i] = crc((const uint8_t *)data.buf + i * BLOCK, rest < BLOCK ? (size_t)rest : BLOCK);
        }
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "block_sums: there must be four bytes for the sum of each block");
    PyBuffer_Release(&data);
    PyBuffer_Release(&sums);
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
    if (r->sums != NULL && (begin < r->first_block || end - r->first_block >= sums->len / 4)) goto wrong;
    r->run = out->itemsize, r->ndim = out->ndim;
    for (; r->ndim > 0; r->ndim--) { /* dims in which the bytes go on in both are part of the run */
        int d = r->ndim - 1;
        if (out->shape[d] != 1 && (in_file[d] != r->run || out->strides[d] != r->run)) break;
        r->run *= out->shape[d];
    }
    for (int d = 0; d < r->ndim; d++)
        r->counts[d] = out->shape[d], r->strides[d] = in_file[d], r->steps[d] = out->strides[d];
    return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "read_box: the box is not within the chunk, or its sums are not all there");
    return -1;
}

static PyObject *box_read(Reader *r, int64_t from, const Py_buffer *out) {
    if ((r->stage = PyMem_RawMalloc(STAGE)) == NULL) return PyErr_NoMemory();
    int state;
    Py_BEGIN_ALLOW_THREADS
    state = take_box(r, from, out->buf);
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
    {"crc32", py_crc32, METH_VARARGS, "crc32(data, way): zlib's CRC-32 of contiguous bytes, by one of ``ways``."},
    {"block_sums", py_block_sums, METH_VARARGS, "block_sums(data, sums): fills sums with that of each block."},
    {"read_box", py_read_box, METH_VARARGS,
     "read_box(fd, start, nbytes, offset, strides, out, sums, first_block) -> (bytes read, damaged block or -1)\n\n"
     "Fills the array with the box of a chunk that begins at an offset and has these strides, both in bytes."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hyper_parallel.core.distributed_checkpoint._crc32",
    .m_doc = "Checksums of blocks, compiled.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__crc32(void) {
    if (way_count == 0) {
        fill_table();
        offer("tables", by_table);
        choose();
    }
    PyObject *made = PyModule_Create(&module), *names = PyTuple_New(way_count);
    if (made == NULL || names == NULL) return NULL;
    for (int i = 0; i < way_count; i++) PyTuple_SET_ITEM(names, i, PyUnicode_FromString(ways[i].name));
    return PyModule_AddObjectRef(made, "ways", names) ? NULL : made;
}
