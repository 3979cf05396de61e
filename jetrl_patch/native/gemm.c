/* GEMM of the exact FP8 mode on the CPU: Y [M,N] = X [M,K] * W [N,K]^T, by the rule and the legend of kernels.c.
 *
 * A SIMD lane is an output column. For each column tile, the weights of one group of K are widened to FP32 and
 * transposed to [k][column]. Then dot += x[m][k] * w[k][lane] over ascending k, one FMA each. After the group,
 * total = fma(dot, sX * sW, total) for FP8; for BF16 one dot runs over all groups. Every element is summed in the
 * order k = 0, 1, 2, ..., whatever its tile. */
#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define PAIRS
#endif

#define MR 8      /* rows of the register tile */
#define NT 32     /* columns of a tile: two vectors */
#define MTILE 256 /* rows whose operands and sums are kept in scratch at a time */

typedef uint8_t b16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

#define LOW(n) {0, n, 1, n + 1, 2, n + 2, 3, n + 3, 4, n + 4, 5, n + 5, 6, n + 6, 7, n + 7}
#define HIGH(n) {8, n + 8, 9, n + 9, 10, n + 10, 11, n + 11, 12, n + 12, 13, n + 13, 14, n + 14, 15, n + 15}

static inline v16 decode16(b16 q) {
    const i16 u = __builtin_convertvector(q, i16), a = u & 127;
    const v16 normal = (v16)((a << 20) + (120 << 23)), small = __builtin_convertvector(a, v16) * 0x1p-9f;
    const i16 is_small = a < 8, is_nan = a == 127;
    i16 bits = ((i16)small & is_small) | ((i16)normal & ~is_small);
    bits = (bits & ~is_nan) | (0x7fc00000 & is_nan);
    return (v16)(bits | ((u & 128) << 24));
}

static inline v16 widen16(h16 x) { return (v16)(__builtin_convertvector(x, i16) << 16); }

/* 16x16 transpose: four rounds of interleaving row i with row i + 8. */
static inline void transpose_bytes(b16 r[16]) {
    b16 t[16];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shuffle(r[i], r[i + 8], (b16)LOW(16));
            t[2 * i + 1] = __builtin_shuffle(r[i], r[i + 8], (b16)HIGH(16));
        }
        memcpy(r, t, sizeof t);
    }
}
static inline void transpose_halves(h16 r[16]) {
    h16 t[16];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shuffle(r[i], r[i + 8], (h16)LOW(16));
            t[2 * i + 1] = __builtin_shuffle(r[i], r[i + 8], (h16)HIGH(16));
        }
        memcpy(r, t, sizeof t);
    }
}

/* Widen up to NT columns of W for k in [k0, k0 + 16) to wt[k][column] in FP32, with zeros outside N and K. */
static void widen_weights(const void *w, int64_t ldw, int64_t n, int64_t k0, int64_t k_end, int fp8, float *wt) {
    for (int half = 0; half < NT; half += 16) {
        const int64_t k_count = k_end - k0 < 16 ? k_end - k0 : 16;
        if (fp8) {
            b16 r[16];
            memset(r, 0, sizeof r);
            for (int j = 0; j < 16 && half + j < n; j++) memcpy(&r[j], (const uint8_t *)w + (half + j) * ldw + k0, (size_t)k_count);
            transpose_bytes(r);
            for (int k = 0; k < 16; k++) *(v16 *)(wt + k * NT + half) = decode16(r[k]);
        } else {
            h16 r[16];
            memset(r, 0, sizeof r);
            for (int j = 0; j < 16 && half + j < n; j++) memcpy(&r[j], (const uint16_t *)w + (half + j) * ldw + k0, (size_t)k_count * 2);
            transpose_halves(r);
            for (int k = 0; k < 16; k++) *(v16 *)(wt + k * NT + half) = widen16(r[k]);
        }
    }
}

/* total += (a, b) * s * sw, one FMA for each column */
static inline __attribute__((always_inline)) void add_scaled(v16 a, v16 b, float s, const float *sw, float *total) {
    v16 *t0 = (v16 *)total, *t1 = t0 + 1;
    *t0 += a * (*(const v16 *)sw * s);
    *t1 += b * (*(const v16 *)(sw + 16) * s);
}

/* rows x NT columns over one group of K. FP8: dot starts at zero and is scaled into `total`; BF16: dot continues `total`. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const float *x, int64_t ldx, const float *wt, int64_t k_count, const float *sx, int64_t ldsx,
    const float *sw, float *total) {
    v16 a[MR], b[MR];
    for (int i = 0; i < rows; i++) {
        a[i] = sx ? (v16){0} : *(v16 *)(total + i * NT);
        b[i] = sx ? (v16){0} : *(v16 *)(total + i * NT + 16);
    }
    for (int64_t k = 0; k < k_count; k++) {
        const v16 w0 = *(const v16 *)(wt + k * NT), w1 = *(const v16 *)(wt + k * NT + 16);
        for (int i = 0; i < rows; i++) {
            const float v = x[i * ldx + k];
            a[i] += w0 * v;
            b[i] += w1 * v;
        }
    }
    for (int i = 0; i < rows; i++) {
        if (sx) {
            add_scaled(a[i], b[i], sx[i * ldsx], sw, total + i * NT);
        } else {
            *(v16 *)(total + i * NT) = a[i];
            *(v16 *)(total + i * NT + 16) = b[i];
        }
    }
}

/* VDPBF16PS adds the products of two BF16 pairs to an FP32 sum: the high halves' first, rounded after each. A product of two
 * e4m3 values is exact in FP32, so with the lower k in the high half the bits are those of two FMAs, in half the instructions.
 * `use_pairs` tries that on this processor. */
static int wanted = 1;

#ifdef PAIRS
static inline uint32_t bf16_of_e4m3(uint32_t q) {
    const uint32_t a = q & 0x7fu;
    uint32_t bits = a < 8u ? as_bits((float)(int32_t)a * 0x1p-9f) >> 16 : (a << 4) + (120u << 7);
    bits = a == 0x7fu ? 0x7fc0u : bits;
    return bits | (q & 0x80u) << 8;
}

static void pair_row(const uint8_t *restrict x, int64_t K, uint32_t *restrict out) {
    for (int64_t k = 0; k + 1 < K; k += 2) out[k / 2] = bf16_of_e4m3(x[k]) << 16 | bf16_of_e4m3(x[k + 1]);
    if (K & 1) out[K / 2] = bf16_of_e4m3(x[K - 1]) << 16;
}

/* As widen_weights, for two k in each word: wt[k / 2][column]. */
static void pair_weights(const uint8_t *w, int64_t ldw, int64_t n, int64_t k0, int64_t k_end, uint32_t *wt) {
    const int64_t k_count = k_end - k0 < 16 ? k_end - k0 : 16;
    /* the bytes of the BF16 values of the codes 0 to 7: 0, 2^-9, 2^-8, ... */
    const __m512i high_small = _mm512_set1_epi64(0x3c3c3c3c3b3b3b00), low_small = _mm512_set1_epi64(0x60402000c0800000);
    uint16_t order[32];  /* words of two vectors, k in lanes of eight columns: column by column, k + 1 below k */
    for (int c = 0; c < 16; c++) {
        order[2 * c + 1] = (uint16_t)(c < 8 ? c : 32 + c - 8);
        order[2 * c] = (uint16_t)(order[2 * c + 1] + 8);
    }
    const __m512i first = _mm512_loadu_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (int half = 0; half < NT; half += 16) {
        b16 r[16];
        memset(r, 0, sizeof r);
        for (int j = 0; j < 16 && half + j < n; j++) memcpy(&r[j], w + (half + j) * ldw + k0, (size_t)k_count);
        transpose_bytes(r);
        for (int k = 0; k < 16; k += 4) {
            const __m512i q = _mm512_loadu_si512(&r[k]), a = _mm512_and_si512(q, _mm512_set1_epi8(0x7f));
            const __mmask64 small = _mm512_cmplt_epu8_mask(a, _mm512_set1_epi8(8));
            const __mmask64 nan = _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8(0x7f));
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f));
            __m512i low = _mm512_and_si512(_mm512_slli_epi16(a, 4), _mm512_set1_epi8((char)0xf0));
            high = _mm512_mask_shuffle_epi8(_mm512_add_epi8(high, _mm512_set1_epi8(0x3c)), small, high_small, a);
            low = _mm512_mask_shuffle_epi8(low, small, low_small, a);
            high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7f));
            low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8((char)0xc0));
            high = _mm512_or_si512(high, _mm512_andnot_si512(_mm512_set1_epi8(0x7f), q));
            const __m512i u0 = _mm512_unpacklo_epi8(low, high), u1 = _mm512_unpackhi_epi8(low, high);
            _mm512_storeu_si512(wt + k / 2 * NT + half, _mm512_permutex2var_epi16(u0, first, u1));
            _mm512_storeu_si512(wt + (k / 2 + 1) * NT + half, _mm512_permutex2var_epi16(u0, second, u1));
        }
    }
}

static inline __m512 add_pair(__m512 sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }

static inline __attribute__((always_inline)) void tile_pairs(
    const int rows, const uint32_t *x, int64_t ldx, const uint32_t *wt, int64_t pairs, const float *sx, int64_t ldsx,
    const float *sw, float *total) {
    __m512 a[MR], b[MR];
    for (int i = 0; i < rows; i++) a[i] = b[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const __m512i w0 = _mm512_loadu_si512(wt + k * NT), w1 = _mm512_loadu_si512(wt + k * NT + 16);
        for (int i = 0; i < rows; i++) {
            const __m512i v = _mm512_set1_epi32((int32_t)x[i * ldx + k]);
            a[i] = add_pair(a[i], v, w0);
            b[i] = add_pair(b[i], v, w1);
        }
    }
    for (int i = 0; i < rows; i++) add_scaled((v16)a[i], (v16)b[i], sx[i * ldsx], sw, total + i * NT);
}

static int use_pairs(void) {
    /* 2^24 + 3 - 1 and 2^24 + 1 + 1 tell the order, and one rounding from two */
    const __m512i x = _mm512_set1_epi32(0x3f803f80);
    const float one = _mm512_cvtss_f32(add_pair(_mm512_set1_ps(0x1p24f), x, _mm512_set1_epi32(0x3f803f80)));
    const float other = _mm512_cvtss_f32(add_pair(_mm512_set1_ps(0x1p24f), x, _mm512_set1_epi32(0x4040bf80)));
    return wanted && one == 0x1p24f && other == 0x1p24f + 4.0f;
}
#else
static int use_pairs(void) { return 0; }
#endif

/* For tests: whether pairs may be used from now on. Returns whether they are. */
int jetrl_pairs(int on) { wanted = on; return use_pairs(); }

/* X: e4m3 with scales sx [M,G] (fp8 = 1) or bf16 (fp8 = 0); W likewise with per-row scales sw [N,G].
 * `splits` > 1 adds the partial sums of `splits` equal ranges of K in ascending order, as the ranks of a
 * tensor-parallel rollout do. out: FP32 (bf16 = 0) or BF16, rounded once. Returns 0, or 1 if out of memory. */
int jetrl_gemm(const void *x, int64_t ldx, const float *sx, const void *w, int64_t ldw, const float *sw,
               int64_t ldsw, int64_t M, int64_t N, int64_t K, int fp8, int splits, int bf16, void *out,
               int threads) {
    const int64_t G = (K + GROUP - 1) / GROUP, step = splits > 1 ? K / splits : K;
    const int64_t mtile = M < MTILE ? M : MTILE;
    const int pairs = fp8 && use_pairs();
    float *xf = aligned_alloc(64, (size_t)round_up(mtile * K * 4, 64));
    if (!xf) return 1;
    int failed = 0;
    for (int64_t m0 = 0; m0 < M; m0 += MTILE) {
        const int64_t rows = M - m0 < MTILE ? M - m0 : MTILE;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                float *restrict row = xf + r * K;
                const uint8_t *restrict x8 = (const uint8_t *)x + (m0 + r) * ldx;
                const uint16_t *restrict x16 = (const uint16_t *)x + (m0 + r) * ldx;
#ifdef PAIRS
                if (pairs) { pair_row(x8, K, (uint32_t *)row); continue; }
#endif
                if (fp8) for (int64_t k = 0; k < K; k++) row[k] = decode_e4m3(x8[k]);
                else for (int64_t k = 0; k < K; k++) row[k] = from_bf16(x16[k]);
            }
            float *wt = aligned_alloc(64, (size_t)((GROUP + 1 + 2 * mtile) * NT * 4));
            if (!wt) failed = 1;
            float *sg = wt + GROUP * NT, *acc = sg + NT, *part = acc + mtile * NT;
#pragma omp for schedule(dynamic, 1)
            for (int64_t n0 = 0; n0 < N; n0 += NT) {
                if (!wt) continue;
                const int64_t cols = N - n0 < NT ? N - n0 : NT;
                const void *wn = fp8 ? (const void *)((const uint8_t *)w + n0 * ldw) : (const void *)((const uint16_t *)w + n0 * ldw);
                for (int split = 0; split < splits; split++) {
                    const int64_t k1 = (split + 1) * step;
                    float *total = split ? part : acc;
                    memset(total, 0, (size_t)(rows * NT * 4));
                    for (int64_t k0 = split * step; k0 < k1; k0 += GROUP) {
                        const int64_t count = k1 - k0 < GROUP ? k1 - k0 : GROUP;
                        const float *sg0 = sx ? sx + m0 * G + k0 / GROUP : 0;
                        for (int64_t j = 0; fp8 && j < NT; j++) sg[j] = j < cols ? sw[(n0 + j) * ldsw + k0 / GROUP] : 0.0f;
#ifdef PAIRS
                        if (pairs) {
                            uint32_t *wp = (uint32_t *)wt;
                            for (int64_t k = 0; k < count; k += 16) pair_weights(wn, ldw, cols, k0 + k, k1, wp + k / 2 * NT);
                            for (int64_t i = 0; i < rows; i += MR) {
                                const uint32_t *xi = (const uint32_t *)xf + i * K + k0 / 2;
                                const int64_t n = (count + 1) / 2;
                                if (rows - i >= MR) tile_pairs(MR, xi, K, wp, n, sg0 + i * G, G, sg, total + i * NT);
                                else
                                    for (int64_t r = i; r < rows; r++, xi += K)
                                        tile_pairs(1, xi, K, wp, n, sg0 + r * G, G, sg, total + r * NT);
                            }
                            continue;
                        }
#endif
                        for (int64_t k = 0; k < count; k += 16) widen_weights(wn, ldw, cols, k0 + k, k1, fp8, wt + k * NT);
                        for (int64_t i = 0; i < rows; i += MR) {
                            const float *xi = xf + i * K + k0;
                            if (rows - i >= MR) tile(MR, xi, K, wt, count, sg0 ? sg0 + i * G : 0, G, sg, total + i * NT);
                            else
                                for (int64_t r = i; r < rows; r++, xi += K)
                                    tile(1, xi, K, wt, count, sg0 ? sg0 + r * G : 0, G, sg, total + r * NT);
                        }
                    }
                    if (split)
                        for (int64_t i = 0; i < rows * NT; i++) acc[i] += part[i];
                }
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t at = (m0 + r) * N + n0;
                    if (bf16) for (int64_t j = 0; j < cols; j++) ((uint16_t *)out)[at + j] = to_bf16(acc[r * NT + j]);
                    else memcpy((float *)out + at, acc + r * NT, (size_t)cols * 4);
                }
            }
            free(wt);
        }
    }
    free(xf);
    return failed;
}
