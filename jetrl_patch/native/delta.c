/* CPU kernels of gated delta nets (arXiv 2412.06464). The rule of kernels.c holds: a token's bits depend on its sequence up to it,
 * and not on the batch, nor on where a prefill was cut. Sequences are computed token by token, and the state is FP32, in memory too.
 *
 * Legend: T tokens of R sequences; token t of sequence r is one of starts[r]..starts[r+1]-1. H heads for values, V wide, and KH heads
 * for keys, K wide; H / KH heads share a key head. C = 2 KH K + H V channels of a convolution with W taps.
 * A sequence continues from the state in slots[r], unless fresh[r], and leaves its state there. Without slots all are fresh. */
#include "numbers.h"

#define CHANNELS 512  /* of a convolution, for one thread */
#define STEPS 64      /* tokens between the states that the gradient keeps */
#define TINY 1e-30f   /* states below it become 0. They would be subnormal soon: slow, and some libraries disable subnormals */

/* y = bf16(silu(sum over W taps of w * x)), ascending taps, from the W - 1 inputs before a token and its own. x [T,C] with row stride
 * ldx, w [C,W], y [T,C]. The state of a slot is the last W - 1 inputs, [W-1,C]; slots are `stride` elements apart. */
void jetrl_conv(const uint16_t *x, int64_t ldx, const uint16_t *w, const int32_t *starts, int64_t R, const int64_t *slots,
                const uint8_t *fresh, uint16_t *state, int64_t stride, int64_t C, int64_t W, uint16_t *y, int threads) {
    const int64_t blocks = (C + CHANNELS - 1) / CHANNELS, before = W - 1;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t begin = starts[r], n = starts[r + 1] - begin, c0 = block * CHANNELS;
            const int64_t width = C - c0 < CHANNELS ? C - c0 : CHANNELS;
            if (n <= 0) continue;
            uint16_t *held = slots ? state + slots[r] * stride + c0 : NULL;
            const int continues = slots && !fresh[r];
            float taps[W][CHANNELS];
            for (int64_t j = 0; j < W; j++)
                for (int64_t c = 0; c < CHANNELS; c++) taps[j][c] = c < width ? from_bf16(w[(c0 + c) * W + j]) : 0.0f;
            for (int64_t t = 0; t < n; t++)
                for (int64_t c = 0; c < width; c += WIDTH) {
                    const int64_t m = width - c < WIDTH ? width - c : WIDTH;
                    vf sum = {0};
                    for (int64_t j = 0; j < W; j++) {
                        const int64_t from = t - before + j;  /* below 0: before this call */
                        if (from < 0 && !continues) continue;
                        const uint16_t *row = from < 0 ? held + (from + before) * C : x + (begin + from) * ldx + c0;
                        sum = fma_v(*(const vf *)(taps[j] + c), m == WIDTH ? load_bf16(row + c) : load_edge(row + c, m), sum);
                    }
                    const vh out = __builtin_convertvector(round_bf16(sum / (1.0f + exp_v(-sum))), vh);
                    memcpy(y + (begin + t) * C + c0 + c, &out, (size_t)(m * 2));
                }
            for (int64_t j = 0; held && j < before; j++) {
                const int64_t from = n - before + j;
                uint16_t *to = held + j * C;
                if (from >= 0) memcpy(to, x + (begin + from) * ldx + c0, (size_t)(width * 2));
                else if (continues) memcpy(to, held + (from + before) * C, (size_t)(width * 2));
                else memset(to, 0, (size_t)(width * 2));
            }
        }
}

/* The rule's inputs from the convolution y [T,C] and the gates a, b [T,H] (row strides lda, ldb):
 *   q [T,KH,K] = y_q / |y_q| / sqrt(K),  k [T,KH,K] = y_k / |y_k|,  |x| = sqrt(sum x^2 + 1e-6)
 *   decay [T,H] = exp(-exp(A) softplus(a + bias)),  beta [T,H] = sigmoid(b)   in FP64, rounded once */
void jetrl_delta_inputs(const uint16_t *y, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, const uint16_t *A,
                        const uint16_t *bias, int64_t T, int64_t KH, int64_t H, int64_t K, int64_t C, float *q, float *k,
                        float *decay, float *beta, int threads) {
    const float scale = 1.0f / sqrtf((float)K);
#pragma omp parallel for num_threads(threads) if (threads > 1 && T > 1)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < 2 * KH; h++) {
            const uint16_t *row = y + t * C + h * K;
            float *out = (h < KH ? q : k) + (t * KH + h % KH) * K;
            lanes sum = {0};
            for (int64_t d = 0; d < K; d += LANES)
                for (int i = 0; i < PARTS; i++) {
                    const int64_t at = d + i * WIDTH, left = K - at;
                    const vf v = left >= WIDTH ? load_bf16(row + at) : load_edge(row + at, left > 0 ? left : 0);
                    sum.part[i] = fma_v(v, v, sum.part[i]);
                }
            const float inverse = 1.0f / sqrtf(lane_sum(sum) + 1e-6f);
            for (int64_t d = 0; d < K; d++) out[d] = from_bf16(row[d]) * inverse * (h < KH ? scale : 1.0f);
        }
        for (int64_t h = 0; h < H; h++) {
            const double z = (double)from_bf16(a[t * lda + h]) + (double)from_bf16(bias[h]);
            const double softplus = z > 0 ? z + log1p(exp(-z)) : log1p(exp(z));
            decay[t * H + h] = (float)exp(-exp((double)from_bf16(A[h])) * softplus);
            beta[t * H + h] = (float)(1.0 / (1.0 + exp(-(double)from_bf16(b[t * ldb + h]))));
        }
    }
}

INLINE vf decayed(const float *s, vf decay) {  /* decay * s, without what is tiny */
    const vf x = *(const vf *)s * decay, size = (vf)((vi)x & 0x7fffffff);
    return pick(size < TINY, (vf){0}, x);
}

/* One token for LANES columns of a head's state S [K], rows `ld` apart. All sums are over ascending k:
 *   S = decay S,  u = v - k^T S,  S += k (beta u),  o = q^T S */
INLINE void step(float *S, int64_t ld, const float *q, const float *k, float decay, float beta, lanes v, int64_t K, lanes *u,
                 lanes *o) {
    lanes kv = {0}, delta;
    const vf factor = all(decay);
    for (int64_t d = 0; d < K; d++)
        for (int i = 0; i < PARTS; i++) {
            vf *s = (vf *)(S + d * ld + i * WIDTH);
            *s = decayed((const float *)s, factor);
            kv.part[i] = fma_v(*s, all(k[d]), kv.part[i]);
        }
    for (int i = 0; i < PARTS; i++) {
        u->part[i] = v.part[i] - kv.part[i];
        delta.part[i] = u->part[i] * beta;
        o->part[i] = (vf){0};
    }
    for (int64_t d = 0; d < K; d++)
        for (int i = 0; i < PARTS; i++) {
            vf *s = (vf *)(S + d * ld + i * WIDTH);
            *s = fma_v(all(k[d]), delta.part[i], *s);
            o->part[i] = fma_v(*s, all(q[d]), o->part[i]);
        }
}

INLINE lanes load_values(const uint16_t *v, int64_t n) {  /* n of LANES values of BF16, then zeros */
    lanes found;
    for (int i = 0; i < PARTS; i++) {
        const int64_t left = n - i * WIDTH;
        found.part[i] = left >= WIDTH ? load_bf16(v + i * WIDTH) : load_edge(v + i * WIDTH, left > 0 ? left : 0);
    }
    return found;
}

/* o [T,H,V] = bf16 of the rule. v [T,H,V] with row stride ldv; q, k, decay, beta of jetrl_delta_inputs. The state of a slot is FP32
 * [H,K,V]; slots are `stride` elements apart. Columns are independent, so each LANES of them are computed on their own.
 * Returns 0, or 1 if out of memory. */
int jetrl_delta_rule(const float *q, const float *k, const uint16_t *v, int64_t ldv, const float *decay, const float *beta,
                     const int32_t *starts, int64_t R, const int64_t *slots, const uint8_t *fresh, float *state, int64_t stride,
                     int64_t KH, int64_t H, int64_t K, int64_t V, uint16_t *o, int threads) {
    const int64_t per = H / KH;
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++)
        for (int64_t h = 0; h < H; h++) {
            if (starts[r + 1] <= starts[r]) continue;
            float *S = aligned_alloc(64, (size_t)(K * LANES * 4));
            if (!S) { failed = 1; continue; }
            for (int64_t c = 0; c < V; c += LANES) {
                const int64_t n = V - c < LANES ? V - c : LANES;
                float *held = slots ? state + slots[r] * stride + h * K * V + c : NULL;
                memset(S, 0, (size_t)(K * LANES * 4));
                for (int64_t d = 0; d < K && held && !fresh[r]; d++) memcpy(S + d * LANES, held + d * V, (size_t)(n * 4));
                for (int64_t t = starts[r]; t < starts[r + 1]; t++) {
                    const int64_t at = (t * KH + h / per) * K;
                    lanes u, sum;
                    step(S, LANES, q + at, k + at, decay[t * H + h], beta[t * H + h], load_values(v + t * ldv + h * V + c, n), K,
                         &u, &sum);
                    for (int64_t i = 0; i < n; i++) o[(t * H + h) * V + c + i] = to_bf16(sum.part[i / WIDTH][i % WIDTH]);
                }
                for (int64_t d = 0; d < K && held; d++) memcpy(held + d * V, S + d * LANES, (size_t)(n * 4));
            }
            free(S);
        }
    return failed;
}

INLINE float dot(const float *a, const float *b, int64_t n) {  /* n is a multiple of LANES */
    lanes sum = {0};
    for (int64_t c = 0; c < n; c += LANES)
        for (int i = 0; i < PARTS; i++)
            sum.part[i] = fma_v(*(const vf *)(a + c + i * WIDTH), *(const vf *)(b + c + i * WIDTH), sum.part[i]);
    return lane_sum(sum);
}

INLINE void add_scaled(float *to, float factor, const float *x, int64_t n) {
    for (int64_t c = 0; c < n; c += WIDTH) *(vf *)(to + c) = fma_v(all(factor), *(const vf *)(x + c), *(vf *)(to + c));
}

/* The gradient of one token. S is the state before it, S1 the one after it, both [K,P]; dS [K,P] is the gradient of S1 before this,
 * and of S after it. grad (of o), u and the scratch g and delta are rows of P. Writes dq, dk [K] and dv [V]. */
static void step_back(const float *S, const float *S1, float *dS, const float *q, const float *k, float decay, float beta,
                      const float *grad, const float *u, float *g, float *delta, int64_t K, int64_t V, int64_t P, float *dq,
                      float *dk, float *dv, float *ddecay, float *dbeta) {
    for (int64_t c = 0; c < P; c++) g[c] = 0.0f, delta[c] = beta * u[c];
    for (int64_t d = 0; d < K; d++) {
        add_scaled(dS + d * P, q[d], grad, P);
        dq[d] = dot(S1 + d * P, grad, P);
        dk[d] = dot(dS + d * P, delta, P);
        add_scaled(g, k[d], dS + d * P, P);
    }
    *dbeta = dot(g, u, P);
    for (int64_t c = 0; c < P; c++) g[c] *= beta;
    memcpy(dv, g, (size_t)(V * 4));
    *ddecay = 0.0f;
    for (int64_t d = 0; d < K; d++) {
        add_scaled(dS + d * P, -k[d], g, P);
        dk[d] -= decay * dot(S + d * P, g, P);
        *ddecay += dot(dS + d * P, S + d * P, P);
        for (int64_t c = 0; c < P; c++) dS[d * P + c] *= decay;
    }
}

/* The gradients of jetrl_delta_rule for fresh sequences, from grad [T,H,V] FP32: dq, dk [T,H,K] of each head for values, dv [T,H,V],
 * ddecay, dbeta [T,H]. The states are computed again: first one every STEPS tokens, then those in between, a chunk at a time from
 * the last one back. Returns 0, or 1 if out of memory. */
int jetrl_delta_gradients(const float *q, const float *k, const uint16_t *v, int64_t ldv, const float *decay, const float *beta,
                          const int32_t *starts, int64_t R, const float *grad, int64_t KH, int64_t H, int64_t K, int64_t V,
                          float *dq, float *dk, float *dv, float *ddecay, float *dbeta, int threads) {
    const int64_t per = H / KH, P = round_up(V, LANES), size = K * P;
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++)
        for (int64_t h = 0; h < H; h++) {
            const int64_t begin = starts[r], end = starts[r + 1], chunks = (end - begin + STEPS - 1) / STEPS;
            if (end <= begin) continue;
            float *kept = aligned_alloc(64, (size_t)(((chunks + STEPS + 2) * size + (STEPS + 3) * P) * 4));
            if (!kept) { failed = 1; continue; }
            float *states = kept + chunks * size, *dS = states + (STEPS + 1) * size, *us = dS + size;
            float *row = us + STEPS * P, *g = row + P, *delta = g + P;
            for (int64_t i = 0; i < size; i++) kept[i] = dS[i] = 0.0f;
            for (int64_t c = 0; c < P; c++) row[c] = 0.0f;
            for (int64_t pass = 1; pass < 2 * chunks; pass++) {  /* all chunks but the last, then all from the last one back */
                const int back = pass >= chunks;
                const int64_t chunk = back ? 2 * chunks - 1 - pass : pass - 1, t0 = begin + chunk * STEPS;
                const int64_t steps = end - t0 < STEPS ? end - t0 : STEPS;
                float *S = back ? states : kept + (chunk + 1) * size;
                memcpy(S, kept + chunk * size, (size_t)(size * 4));
                for (int64_t i = 0; i < steps; i++) {
                    const int64_t t = t0 + i, at = (t * KH + h / per) * K;
                    if (back) memcpy(S + size, S, (size_t)(size * 4)), S += size;
                    for (int64_t c = 0; c < V; c += LANES) {
                        lanes u, o;
                        step(S + c, P, q + at, k + at, decay[t * H + h], beta[t * H + h], load_values(v + t * ldv + h * V + c, V - c), K,
                             &u, &o);
                        memcpy(us + i * P + c, &u, sizeof u);
                    }
                }
                for (int64_t i = steps - 1; i >= 0 && back; i--) {
                    const int64_t t = t0 + i, at = (t * KH + h / per) * K, own = t * H + h;
                    memcpy(row, grad + own * V, (size_t)(V * 4));
                    step_back(states + i * size, states + (i + 1) * size, dS, q + at, k + at, decay[own], beta[own], row, us + i * P,
                              g, delta, K, V, P, dq + own * K, dk + own * K, dv + own * V, ddecay + own, dbeta + own);
                }
            }
            free(kept);
        }
    return failed;
}
