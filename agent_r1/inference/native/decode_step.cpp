// A decode step of Llama-like models: one new token for each running row, from embedding to logits. A prefill is the
// same step without logits, in which several rows are successive tokens of one sequence. Matrices are in float32 or in
// bfloat16; norms, biases and all arithmetic are in float32.
//
// A row's result has the same bits whatever the other rows are, and however many rows and threads there are:
// every sum is computed in an order that depends only on the model and on the length of the row.
// Products are added to sums by multiply_add, and the compiler fuses nothing by itself (-ffp-contract=off): GCC decides from
// loop to loop whether fusing pays, so two instances of one template would round differently.
//
// Shapes: N running rows, E width, H query heads, K key-value heads, D head size, I inner width, V vocabulary.
// A packed matrix (outputs, inputs) is stored in panels of LANES outputs: (panels, inputs, LANES), padded with zeros.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 8;  // 24 sums, 3 weights and 1 state in 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_ROWS = 4;  // 12 sums, 3 weights and 1 state in 16 registers
#else
constexpr int LANES = 4, TILE_ROWS = 4;
#endif
constexpr int TILE_PANELS = 3, CHAINS = 4;

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half;  // a bfloat16: the upper half of a float
typedef Half Halves __attribute__((vector_size(LANES * 2)));

// y = x W^T + bias + (x A^T) B^T. Without an adapter, which has A (rank, inputs) and B (outputs, rank), rank is 0.
struct Linear {
    const void *packed;  // W (outputs, inputs), of Half if the model ``is_half``, else of float
    const float *bias, *a, *b;  // bias (outputs,) or null; a and b are packed
    int64_t inputs, outputs, rank;
};

struct Layer {
    const float *input_norm, *query_norm, *key_norm, *mlp_norm;
    Linear qkv, output, gate_up, down;
};

struct Model {
    int64_t layers, width, heads, kv_heads, head_size, inner, vocabulary, is_half, widest_rank;
    float epsilon, scaling;
    const float *norm;
    const void *embedding;  // (V, E), of Half or float, not packed
    Linear head;
    const Layer *layer;
};

// keys[layer] and values[layer] have the shape (rows of the block, K, capacity, D); places are rows of the block. Rows
// with the same place stand one after the other, with ascending lengths. Without logits, only keys and values are wanted.
struct Step {
    int64_t rows, threads, capacity, longest;
    const int64_t *token_ids, *places, *lengths;
    float *const *keys, *const *values;
    const float *cos, *sin;  // (positions, D)
    float *scratch, *logits;
};

// a * b + c, rounded once if the processor can.
static inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline Vector all_lanes(float value) {
#if defined(__AVX512F__)
    return (Vector)_mm512_set1_ps(value);
#elif defined(__AVX__)
    return (Vector)_mm256_set1_ps(value);
#else
    return Vector{value, value, value, value};
#endif
}

static inline Vector load(const float *from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

static inline Vector load(const Half *from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vector)(__builtin_convertvector(halves, Integers) << 16);
}

static inline void store(float *to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

// Load and store the first ``count`` <= LANES lanes; the other lanes are 0.
static inline Vector load_part(const float *from, int64_t count) {
    if (count == LANES) return load(from);
    Vector vector = {};
    for (int64_t lane = 0; lane < count; lane++) vector[lane] = from[lane];
    return vector;
}

static inline void store_part(float *to, Vector vector, int64_t count) {
    if (count == LANES) return store(to, vector);
    for (int64_t lane = 0; lane < count; lane++) to[lane] = vector[lane];
}

static inline float total(Vector vector) {
    float lanes[LANES];
    store(lanes, vector);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// exp(x) with a relative error below 2e-7: 2^n e^r with |r| <= ln(2) / 2. Arguments are clamped to finite results.
static inline Vector exponential(Vector x) {
    const Vector low = Vector{} - 87.0f, high = Vector{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vector magic = all_lanes(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = multiply_add(x, all_lanes(1.44269504f), magic) - magic;
    const Vector r = multiply_add(n, all_lanes(-1.42860677e-6f), multiply_add(n, all_lanes(-0.693145752f), x));
    Vector p = multiply_add(r, all_lanes(1.0f / 5040), all_lanes(1.0f / 720));
    for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, all_lanes(coefficient));
    Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// Lane l of both results is a lane of one of a and b, so that low + high halves the segments of SIZE lanes in both.
template <int SIZE, int... L>
static inline Vector add_halves(Vector a, Vector b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
    Vector low = __builtin_shufflevector(a, b, (L % SIZE < SIZE / 2 ? L : L - SIZE / 2 + LANES)...);
    Vector high = __builtin_shufflevector(a, b, (L % SIZE < SIZE / 2 ? L + SIZE / 2 : L + LANES)...);
#else
    Vector low = __builtin_shuffle(a, b, Integers{(L % SIZE < SIZE / 2 ? L : L - SIZE / 2 + LANES)...});
    Vector high = __builtin_shuffle(a, b, Integers{(L % SIZE < SIZE / 2 ? L + SIZE / 2 : L + LANES)...});
#endif
    return low + high;
}

// Return the vector whose lane t is the sum over the lanes of vectors[t]. SIZE vectors are left to be added.
template <int SIZE>
static inline Vector totals(Vector *vectors) {
    for (int index = 0; index < SIZE / 2; index++)
        vectors[index] = add_halves<SIZE>(vectors[index], vectors[index + SIZE / 2],
                                          std::make_integer_sequence<int, LANES>());
    if constexpr (SIZE > 2) return totals<SIZE / 2>(vectors);
    return vectors[0];
}

// y = x W^T + bias, or y + x W^T + bias, for ROWS rows and PANELS panels. The sum over inputs is in ascending order.
template <typename W, int ROWS, int PANELS>
static void multiply_tile(const float *x, int64_t x_stride, const W *packed, int64_t inputs, const float *bias,
                          float *y, int64_t y_stride, int64_t outputs, bool add) {
    Vector sums[ROWS][PANELS] = {};
    for (int64_t input = 0; input < inputs; input++) {
        Vector weights[PANELS];
        for (int panel = 0; panel < PANELS; panel++) {
            const W *from = packed + (panel * inputs + input) * LANES;
            weights[panel] = load(from);
            __builtin_prefetch(from + TILE_PANELS * inputs * LANES, 0, 2);  // for the next tile
        }
        for (int row = 0; row < ROWS; row++) {
            const Vector state = all_lanes(x[row * x_stride + input]);
            for (int panel = 0; panel < PANELS; panel++)
                sums[row][panel] = multiply_add(state, weights[panel], sums[row][panel]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int panel = 0; panel < PANELS; panel++) {
            const int64_t first = panel * LANES, count = std::min<int64_t>(LANES, outputs - first);
            float *to = y + row * y_stride + first;
            Vector sum = sums[row][panel];
            if (bias != nullptr) sum = sum + load_part(bias + first, count);
            if (add) sum = load_part(to, count) + sum;
            store_part(to, sum, count);
        }
}

template <typename W>
using Tile = void (*)(const float *, int64_t, const W *, int64_t, const float *, float *, int64_t, int64_t, bool);

template <typename W, int... R>
static const Tile<W> *tiles(std::integer_sequence<int, R...>) {
    static const Tile<W> table[] = {multiply_tile<W, R / TILE_PANELS + 1, R % TILE_PANELS + 1>...};
    return table;
}

template <typename W>
static void multiply(const float *x, int64_t rows, const W *packed, int64_t inputs, int64_t outputs,
                     const float *bias, float *y, int64_t y_stride, bool add) {
    const Tile<W> *table = tiles<W>(std::make_integer_sequence<int, TILE_ROWS * TILE_PANELS>());
    const int64_t panels = (outputs + LANES - 1) / LANES;
    for (int64_t panel = 0; panel < panels; panel += TILE_PANELS) {
        const int64_t wide = std::min<int64_t>(TILE_PANELS, panels - panel), first = panel * LANES;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int64_t high = std::min<int64_t>(TILE_ROWS, rows - row);
            table[(high - 1) * TILE_PANELS + wide - 1](
                x + row * inputs, inputs, packed + first * inputs, inputs, bias == nullptr ? nullptr : bias + first,
                y + row * y_stride + first, y_stride, outputs - first, add);
        }
    }
}

// Write y, or y + old y, of a linear layer. ``low`` has room for the products x A^T (rows, rank).
template <typename W>
static void apply(const Linear &layer, const float *x, int64_t rows, float *low, float *y, bool add) {
    const W *packed = static_cast<const W *>(layer.packed);
    multiply(x, rows, packed, layer.inputs, layer.outputs, layer.bias, y, layer.outputs, add);
    if (layer.rank == 0) return;
    multiply(x, rows, layer.a, layer.inputs, layer.rank, nullptr, low, layer.rank, false);
    multiply(low, rows, layer.b, layer.rank, layer.outputs, nullptr, y, layer.outputs, true);
}

// Write row ``index`` of a matrix (.., size) that is not packed.
template <typename W>
static void copy_row(const void *matrix, int64_t index, int64_t size, float *to) {
    const W *from = static_cast<const W *>(matrix) + index * size;
    if constexpr (sizeof(W) == sizeof(float)) {
        std::memcpy(to, from, size * sizeof(float));
    } else {
        for (int64_t i = 0; i < size; i++) {
            const uint32_t bits = uint32_t(from[i]) << 16;
            std::memcpy(to + i, &bits, sizeof bits);
        }
    }
}

// x / sqrt(mean(x^2) + epsilon) * weight
static void rms_norm(const float *x, const float *weight, int64_t size, float epsilon, float *y) {
    Vector squares = {};
    for (int64_t index = 0; index < size; index += LANES) {
        const Vector part = load_part(x + index, std::min<int64_t>(LANES, size - index));
        squares = multiply_add(part, part, squares);
    }
    const float factor = 1.0f / std::sqrt(total(squares) / size + epsilon);
    for (int64_t index = 0; index < size; index++) y[index] = x[index] * factor * weight[index];
}

// Rotate the pairs (a, b) = (x[i], x[i + D / 2]): (a cos - b sin, b cos + a sin), times a factor.
static void rotate(float *x, const float *cos, const float *sin, int64_t size, float factor) {
    const int64_t half = size / 2;
    for (int64_t index = 0; index < half; index++) {
        const float a = x[index], b = x[index + half];
        const float left = a * cos[index], right = b * cos[index + half];
        x[index] = std::fma(-b, sin[index], left) * factor;
        x[index + half] = std::fma(a, sin[index + half], right) * factor;
    }
}

// Return the vector whose lane l is the sum of query[i] key[i] over all i = l, l + LANES, .. in ascending order.
static inline Vector multiply_lanes(const float *query, const float *key, int64_t size) {
    Vector sums = {};
    int64_t index = 0;
    for (; index + LANES <= size; index += LANES) sums = multiply_add(load(query + index), load(key + index), sums);
    if (index < size)
        sums = multiply_add(load_part(query + index, size - index), load_part(key + index, size - index), sums);
    return sums;
}

// Softmax of the scores of one query with ``count`` keys, then the weighted sum of the values.
static void attend(const float *query, const float *keys, const float *values, int64_t count, int64_t size,
                   float *weights, float *mixed) {
    Vector maxima = Vector{} - INFINITY;
    for (int64_t token = 0; token < count; token += LANES) {
        Vector products[LANES] = {};
        const int64_t here = std::min<int64_t>(LANES, count - token);
        for (int64_t lane = 0; lane < here; lane++) {
            const int64_t place = (token + lane) * size;
            products[lane] = multiply_lanes(query, keys + place, size);
            for (int64_t index = 0; index < size; index += LANES) __builtin_prefetch(values + place + index);
        }
        Vector scores = totals<LANES>(products);
        for (int64_t lane = here; lane < LANES; lane++) scores[lane] = -INFINITY;
        maxima = scores > maxima ? scores : maxima;
        store(weights + token, scores);
    }
    float maximum = maxima[0];
    for (int lane = 1; lane < LANES; lane++) maximum = std::max(maximum, float(maxima[lane]));
    Vector sums = {};
    for (int64_t token = 0; token < count; token += LANES) {
        Vector weight = exponential(load(weights + token) - maximum);
        for (int64_t lane = std::min<int64_t>(LANES, count - token); lane < LANES; lane++) weight[lane] = 0;
        sums += weight;
        store(weights + token, weight);
    }
    const float factor = 1.0f / total(sums);
    for (int64_t index = 0; index < size; index += LANES) {  // token t is added to sum t % CHAINS
        const int64_t width = std::min<int64_t>(LANES, size - index);
        Vector chains[CHAINS] = {};
        int64_t token = 0;
        if (width == LANES) {
            for (; token + CHAINS <= count; token += CHAINS)
                for (int chain = 0; chain < CHAINS; chain++) {
                    const Vector value = load(values + (token + chain) * size + index);
                    chains[chain] = multiply_add(all_lanes(weights[token + chain]), value, chains[chain]);
                }
        }
        for (; token < count; token++) {
            const Vector value = load_part(values + token * size + index, width);
            chains[token % CHAINS] = multiply_add(all_lanes(weights[token]), value, chains[token % CHAINS]);
        }
        const Vector sum = ((chains[0] + chains[1]) + (chains[2] + chains[3])) * factor;
        store_part(mixed + index, sum, width);
    }
}

// Normalize and rotate the queries and the key of a row, append key and value to the cache, and attend if asked to.
static void attend_row(const Model &model, const Layer &layer, const Step &step, int64_t number, int64_t row,
                       float *qkv, float *weights, float *mixed, bool attends) {
    const int64_t size = model.head_size, length = step.lengths[row], group = model.heads / model.kv_heads;
    const float *cos = step.cos + length * size, *sin = step.sin + length * size;
    float *new_keys = qkv + model.heads * size, *new_values = new_keys + model.kv_heads * size;
    for (int64_t head = 0; head < model.heads; head++) {
        float *query = qkv + head * size;
        if (layer.query_norm != nullptr) rms_norm(query, layer.query_norm, size, model.epsilon, query);
        rotate(query, cos, sin, size, model.scaling);
    }
    for (int64_t head = 0; head < model.kv_heads; head++) {
        float *key = new_keys + head * size;
        if (layer.key_norm != nullptr) rms_norm(key, layer.key_norm, size, model.epsilon, key);
        rotate(key, cos, sin, size, 1.0f);
        const int64_t first = (step.places[row] * model.kv_heads + head) * step.capacity * size;
        float *keys = step.keys[number] + first, *values = step.values[number] + first;
        std::memcpy(keys + length * size, key, size * sizeof(float));
        std::memcpy(values + length * size, new_values + head * size, size * sizeof(float));
        for (int64_t query = head * group; attends && query < (head + 1) * group; query++)
            attend(qkv + query * size, keys, values, length + 1, size, weights, mixed + query * size);
    }
}

static int64_t widest(const Model &model) {
    return std::max((model.heads + 2 * model.kv_heads) * model.head_size, 2 * model.inner);
}

static int64_t row_floats(const Model &model, int64_t longest) {
    return 2 * model.width + widest(model) + std::max(model.heads * model.head_size, model.inner) +
           model.widest_rank + longest + LANES;
}

static void norm_rows(const float *x, const float *weight, const Model &model, int64_t rows, float *y) {
    for (int64_t row = 0; row < rows; row++)
        rms_norm(x + row * model.width, weight, model.width, model.epsilon, y + row * model.width);
}

// Write silu(gate) * up for rows (gate, up).
static void gate_rows(const float *gate_up, int64_t rows, int64_t inner, float *y) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t index = 0; index < inner; index += LANES) {
            const int64_t width = std::min<int64_t>(LANES, inner - index);
            const float *from = gate_up + row * 2 * inner + index;
            const Vector gate = load_part(from, width), up = load_part(from + inner, width);
            const Vector gated = gate / (1.0f + exponential(-gate)) * up;
            store_part(y + row * inner + index, gated, width);
        }
}

// Compute the rows first .. last - 1 of a step.
template <typename W>
static void compute_rows(const Model &model, const Step &step, int64_t first, int64_t last) {
    const int64_t rows = last - first, width = model.width, mixed_width = model.heads * model.head_size;
    const int64_t qkv_width = mixed_width + 2 * model.kv_heads * model.head_size;
    float *hidden = step.scratch + first * row_floats(model, step.longest);
    float *normed = hidden + rows * width, *wide = normed + rows * width, *mixed = wide + rows * widest(model);
    float *low = mixed + rows * std::max(mixed_width, model.inner), *weights = low + rows * model.widest_rank;
    for (int64_t row = 0; row < rows; row++)
        copy_row<W>(model.embedding, step.token_ids[first + row], width, hidden + row * width);
    for (int64_t number = 0; number < model.layers; number++) {
        const Layer &layer = model.layer[number];
        norm_rows(hidden, layer.input_norm, model, rows, normed);
        apply<W>(layer.qkv, normed, rows, low, wide, false);
        const bool is_end = step.logits == nullptr && number + 1 == model.layers;
        for (int64_t row = 0; row < rows; row++)
            attend_row(model, layer, step, number, first + row, wide + row * qkv_width, weights,
                       mixed + row * mixed_width, !is_end);
        if (is_end) return;
        apply<W>(layer.output, mixed, rows, low, hidden, true);
        norm_rows(hidden, layer.mlp_norm, model, rows, normed);
        apply<W>(layer.gate_up, normed, rows, low, wide, false);
        gate_rows(wide, rows, model.inner, mixed);
        apply<W>(layer.down, mixed, rows, low, hidden, true);
    }
    norm_rows(hidden, model.norm, model, rows, normed);
    apply<W>(model.head, normed, rows, low, step.logits + first * model.vocabulary, false);
}

extern "C" {

int64_t lanes() { return LANES; }

int64_t scratch_floats(const Model *model, int64_t rows, int64_t longest) {
    return rows * row_floats(*model, longest);
}

void decode_step(const Model *model, const Step *step) {
    const int64_t threads = std::max<int64_t>(1, std::min(step->threads, step->rows));
    const int64_t share = (step->rows + threads - 1) / threads;
    std::vector<std::thread> others;
    const auto compute = model->is_half ? compute_rows<Half> : compute_rows<float>;
    int64_t first = 0;
    while (true) {
        int64_t last = std::min(first + share, step->rows);
        while (last < step->rows && step->places[last] == step->places[last - 1]) last++;  // tokens of one sequence
        if (last == step->rows) break;
        others.emplace_back(compute, std::cref(*model), std::cref(*step), first, last);
        first = last;
    }
    compute(*model, *step, first, step->rows);
    for (std::thread &other : others) other.join();
}
}
