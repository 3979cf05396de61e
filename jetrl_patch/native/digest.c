/* The digest of a weight (jetrl_patch/sync/digest.py) in one pass over its bytes:
 *
 *     digest = sum over rows r and byte columns c of  row(r) * col(c) * (byte[r,c] + 1)   mod 2^64
 *
 * The inner sum over a row is a dot product of bytes and 64-bit hashes. Each hash is split into four signed 16-bit digits,
 *
 *     col = d0 + d1 * 2^16 + d2 * 2^32 + d3 * 2^48   mod 2^64,   -32768 <= d < 32768
 *
 * so that one vector instruction multiplies 16 or 32 bytes by as many digits and adds neighbours in 32 bits. Over BLOCK columns, a
 * 32-bit lane adds at most BLOCK/8 products of magnitude 255 * 32768, which stays below 2^31. Everything is exact modulo 2^64, so
 * neither the order of the sums nor the number of threads changes a digest.
 */
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BLOCK 2048 /* byte columns whose digits are in memory together: 16 KiB, half of an L1 cache */

static inline uint64_t odd_hash(uint64_t index, uint64_t salt) {  /* splitmix64, forced odd */
    uint64_t z = index + 0x9e3779b97f4a7c15ull * salt;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) | 1;
}

#if defined(__AVX512BW__)
#define STEP 32
typedef __m512i vec;
static inline vec zeros(void) { return _mm512_setzero_si512(); }
static inline vec widen(const uint8_t *x) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)x)); }
static inline vec multiply_add(vec sum, vec x, const int16_t *digits) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, x, _mm512_load_si512(digits));
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, _mm512_load_si512(digits)));
#endif
}
static inline int64_t lanes(vec sum) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(
        _mm512_cvtepi32_epi64(_mm512_castsi512_si256(sum)), _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sum, 1))));
}
#elif defined(__AVX2__)
#define STEP 16
typedef __m256i vec;
static inline vec zeros(void) { return _mm256_setzero_si256(); }
static inline vec widen(const uint8_t *x) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)x)); }
static inline vec multiply_add(vec sum, vec x, const int16_t *digits) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, _mm256_load_si256((const __m256i *)digits)));
}
static inline int64_t lanes(vec sum) {
    int64_t lane[4];
    _mm256_storeu_si256((__m256i *)lane, _mm256_add_epi64(
        _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sum)), _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sum, 1))));
    return lane[0] + lane[1] + lane[2] + lane[3];
}
#endif

#ifdef STEP
typedef struct { int16_t digit[4][BLOCK] __attribute__((aligned(64))); } columns;

static void fill(columns *t, int64_t first, int64_t n) {
    for (int64_t c = 0; c < (n + STEP - 1) / STEP * STEP; c++) {
        uint64_t rest = odd_hash((uint64_t)(first + c), 2);
        for (int i = 0; i < 4; i++) {
            const int16_t d = (int16_t)(uint16_t)rest;
            t->digit[i][c] = d;
            rest = (rest - (uint64_t)(int64_t)d) >> 16;
        }
    }
}

static inline uint64_t dot(const uint8_t *x, int64_t n, int64_t ld, const columns *t) {
    vec a0 = zeros(), a1 = zeros(), a2 = zeros(), a3 = zeros();
    int64_t c = 0;
#define ADD(bytes)                                \
    {                                             \
        const vec v = widen(bytes);               \
        a0 = multiply_add(a0, v, t->digit[0] + c); \
        a1 = multiply_add(a1, v, t->digit[1] + c); \
        a2 = multiply_add(a2, v, t->digit[2] + c); \
        a3 = multiply_add(a3, v, t->digit[3] + c); \
    }
    for (; c + STEP <= n; c += STEP) {
        __builtin_prefetch(x + ld + c);  /* the next row of this block, because the processor does not predict the jump */
        ADD(x + c)
    }
    if (c < n) {
        uint8_t rest[STEP] = {0};
        memcpy(rest, x + c, (size_t)(n - c));
        ADD(rest)
    }
#undef ADD
    return (uint64_t)lanes(a0) + ((uint64_t)lanes(a1) << 16) + ((uint64_t)lanes(a2) << 32) + ((uint64_t)lanes(a3) << 48);
}
#else
typedef struct { uint64_t col[BLOCK]; } columns;

static void fill(columns *t, int64_t first, int64_t n) {
    for (int64_t c = 0; c < n; c++) t->col[c] = odd_hash((uint64_t)(first + c), 2);
}

static uint64_t dot(const uint8_t *x, int64_t n, int64_t ld, const columns *t) {
    (void)ld;
    uint64_t sum = 0;
    for (int64_t c = 0; c < n; c++) sum += t->col[c] * x[c];
    return sum;
}
#endif

static int holds_special(const uint8_t *x, int64_t n, int size) {  /* a BF16 (size 2) or FP32 (4) NaN or infinity in n bytes */
    int found = 0;
    for (int64_t c = size - 2; c < n; c += size) {  /* the half with the exponent */
        uint16_t value;
        memcpy(&value, x + c, 2);
        found |= (value & 0x7f80u) == 0x7f80u;
    }
    return found;
}

/* Bytes [rows, cols] with a row stride of `ld` bytes; `row0` and `col0` (in bytes) place them in the whole tensor.
 * out[0]: the digest. out[1]: for BF16 (`size` 2) and FP32 (4), whether a value is NaN or infinite; else 0. */
void jetrl_digest(const uint8_t *x, int64_t ld, int64_t rows, int64_t cols, int64_t row0, int64_t col0, int size,
                  uint64_t *out, int threads) {
    uint64_t total = 0;
    int special = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : total) reduction(| : special)
    {
        int64_t first = 0, last = rows;
#ifdef _OPENMP
        first = rows * omp_get_thread_num() / omp_get_num_threads();
        last = rows * (omp_get_thread_num() + 1) / omp_get_num_threads();
#endif
        columns table;
        for (int64_t c = 0; first < last && c < cols; c += BLOCK) {
            const int64_t n = cols - c < BLOCK ? cols - c : BLOCK;
            fill(&table, col0 + c, n);
            uint64_t ones = 0;  /* the "+ 1" of every byte */
            for (int64_t i = 0; i < n; i++) ones += odd_hash((uint64_t)(col0 + c + i), 2);
            for (int64_t r = first; r < last; r++) {
                const uint8_t *row = x + r * ld + c;
                total += odd_hash((uint64_t)(row0 + r), 1) * (dot(row, n, ld, &table) + ones);
                if (size) special |= holds_special(row, n, size);
            }
        }
    }
    out[0] = total;
    out[1] = (uint64_t)special;
}
