// Trains a small convolutional network through bedstone's C interface: two convolutions with ReLU
// and pooling, a third that makes class scores, softmax, and plain gradient descent. The images
// are stripes of four directions under noise, made here.
//
//   bedstone build-c --out lib
//   c++ -O2 examples/c/train.cpp -Ilib -Llib -lbedstone -Wl,-rpath,$PWD/lib -o train && ./train

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bedstone.h"

namespace {

constexpr int kBatch = 32, kSize = 16, kClasses = 4, kSteps = 60, kThreads = 0;
constexpr float kRate = 0.5f;

void check(int status, const char *what)
{
    if (status != BS_SUCCESS) {
        std::fprintf(stderr, "%s: %s\n", what, bs_status_string(status));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

// A dense float32 tensor in memory of its own.
struct Tensor {
    bs_tensor desc;
    std::vector<float> values;

    explicit Tensor(const std::vector<int64_t> &dims)
    {
        CHECK(bs_tensor_init(&desc, BS_FLOAT32, static_cast<int>(dims.size()), dims.data(), nullptr));
        size_t size = 1;
        for (int64_t dim : dims)
            size *= static_cast<size_t>(dim);
        values.resize(size);
    }

    float *data() { return values.data(); }
};

std::vector<char> workspace;

void *workspace_for(int direction, const bs_convolution &conv, const Tensor &x, const Tensor &w,
    const Tensor &y)
{
    size_t bytes = 0;
    CHECK(bs_convolution_workspace_size(
        direction, &conv, &x.desc, &w.desc, &y.desc, kThreads, &bytes));
    if (workspace.size() < bytes)
        workspace.resize(bytes);
    return workspace.data();
}

// A convolution with bias: its parameters, their gradients, and what it made of its input.
class Convolution {
public:
    Convolution(const std::vector<int64_t> &input, int filters, int window, std::mt19937 &random)
        : w({filters, input[1], window, window}), dw(w), bias({filters}), dbias(bias), y({1})
    {
        int64_t dims[BS_MAX_RANK];
        Tensor x(input);
        for (int axis = 0; axis < 2; axis++) {
            conv.padding[axis][0] = conv.padding[axis][1] = window / 2;
            conv.stride[axis] = conv.dilation[axis] = 1;
        }
        conv.groups = 1;
        conv.mode = BS_CROSS_CORRELATION;
        CHECK(bs_convolution_output_dims(&conv, &x.desc, &w.desc, dims));
        y = Tensor({dims[0], dims[1], dims[2], dims[3]});
        std::normal_distribution<float> normal(
            0.0f, std::sqrt(2.0f / static_cast<float>(input[1] * window * window)));
        for (float &value : w.values)
            value = normal(random);
    }

    Tensor &forward(Tensor &x)
    {
        void *memory = workspace_for(BS_FORWARD, conv, x, w, y);
        CHECK(bs_convolution_forward(&conv, 1.0, &x.desc, x.data(), &w.desc, w.data(), bias.data(),
            0.0, &y.desc, y.data(), memory, workspace.size(), kThreads));
        return y;
    }

    // Gradients of the parameters; of the input into dx, unless it is null.
    void backward(Tensor &x, Tensor &dy, Tensor *dx)
    {
        CHECK(bs_convolution_backward_bias(
            1.0, &dy.desc, dy.data(), 0.0, &dbias.desc, dbias.data(), kThreads));
        void *memory = workspace_for(BS_BACKWARD_FILTER, conv, x, w, dy);
        CHECK(bs_convolution_backward_filter(&conv, 1.0, &x.desc, x.data(), &dy.desc, dy.data(),
            0.0, &dw.desc, dw.data(), memory, workspace.size(), kThreads));
        if (dx == nullptr)
            return;
        memory = workspace_for(BS_BACKWARD_DATA, conv, *dx, w, dy);
        CHECK(bs_convolution_backward_data(&conv, 1.0, &w.desc, w.data(), &dy.desc, dy.data(), 0.0,
            &dx->desc, dx->data(), memory, workspace.size(), kThreads));
    }

    // w = w - rate * dw.
    void descend()
    {
        CHECK(bs_tensor_transform(
            -kRate, &dw.desc, dw.data(), 1.0, &w.desc, w.data(), kThreads));
        CHECK(bs_tensor_transform(
            -kRate, &dbias.desc, dbias.data(), 1.0, &bias.desc, bias.data(), kThreads));
    }

private:
    bs_convolution conv = {};
    Tensor w, dw, bias, dbias, y;
};

// ReLU in place, then pooling.
class Pool {
public:
    Pool(const std::vector<int64_t> &input, int mode, int window)
        : y({input[0], input[1], input[2] / window, input[3] / window}), dx(input)
    {
        for (int axis = 0; axis < 2; axis++) {
            pool.window[axis] = pool.stride[axis] = window;
            pool.dilation[axis] = 1;
        }
        pool.mode = mode;
        relu.kind = BS_ACTIVATION_RELU;
    }

    Tensor &forward(Tensor &x)
    {
        CHECK(bs_activation_forward(
            &relu, 1.0, &x.desc, x.data(), 0.0, &x.desc, x.data(), kThreads));
        CHECK(bs_pooling_forward(
            &pool, 1.0, &x.desc, x.data(), 0.0, &y.desc, y.data(), kThreads));
        return y;
    }

    Tensor &backward(Tensor &x, Tensor &dy)
    {
        CHECK(bs_pooling_backward(&pool, 1.0, &x.desc, x.data(), &dy.desc, dy.data(), 0.0,
            &dx.desc, dx.data(), kThreads));
        CHECK(bs_activation_backward(&relu, 1.0, &x.desc, x.data(), &dx.desc, dx.data(), 0.0,
            &dx.desc, dx.data(), kThreads));
        return dx;
    }

private:
    bs_pooling pool = {};
    bs_activation relu = {};
    Tensor y, dx;
};

// Images of stripes: the class says their direction.
void draw(Tensor &images, std::vector<int> &labels, std::mt19937 &random)
{
    const double directions[kClasses][2] = {{1, 0}, {0, 1}, {1, 1}, {1, -1}};
    std::uniform_int_distribution<int> any(0, kClasses - 1);
    std::uniform_real_distribution<double> phase(0.0, 6.28);
    std::normal_distribution<double> noise(0.0, 0.3);
    for (int n = 0; n < kBatch; n++) {
        labels[static_cast<size_t>(n)] = any(random);
        const double *direction = directions[labels[static_cast<size_t>(n)]];
        double start = phase(random);
        for (int i = 0; i < kSize * kSize; i++) {
            double along = direction[0] * (i / kSize) + direction[1] * (i % kSize);
            images.values[static_cast<size_t>(n * kSize * kSize + i)] =
                static_cast<float>(std::sin(1.3 * along + start) + noise(random));
        }
    }
}

} // namespace

int main()
{
    std::mt19937 random(7);
    Tensor images({kBatch, 1, kSize, kSize});
    std::vector<int> labels(kBatch);
    Convolution first({kBatch, 1, kSize, kSize}, 8, 3, random);
    Pool halved({kBatch, 8, kSize, kSize}, BS_POOLING_MAX, 2);
    Convolution second({kBatch, 8, kSize / 2, kSize / 2}, 16, 3, random);
    Pool mean({kBatch, 16, kSize / 2, kSize / 2}, BS_POOLING_AVERAGE_INCLUDE_PADDING, kSize / 2);
    Convolution scores({kBatch, 16, 1, 1}, kClasses, 1, random);
    Tensor likely({kBatch, kClasses, 1, 1}), wanted(likely), dz(likely);
    Tensor d_mean({kBatch, 16, 1, 1}), d_halved({kBatch, 8, kSize / 2, kSize / 2});
    double right = 0.0, seen = 0.0;

    for (int step = 0; step < kSteps; step++) {
        draw(images, labels, random);
        Tensor &a = first.forward(images);
        Tensor &b = halved.forward(a);
        Tensor &c = second.forward(b);
        Tensor &d = mean.forward(c);
        Tensor &z = scores.forward(d);
        CHECK(bs_softmax_forward(BS_SOFTMAX_LOG, BS_SOFTMAX_CHANNEL, 1.0, &z.desc, z.data(), 0.0,
            &likely.desc, likely.data(), kThreads));

        // The loss is the mean of -log p(label); its gradient by log p goes through the softmax.
        double loss = 0.0;
        CHECK(bs_tensor_set(0.0, 0.0, &wanted.desc, wanted.data(), kThreads));
        for (int n = 0; n < kBatch; n++) {
            const float *row = likely.data() + n * kClasses;
            int label = labels[static_cast<size_t>(n)], best = 0;
            for (int k = 1; k < kClasses; k++)
                best = row[k] > row[best] ? k : best;
            loss -= row[label] / kBatch;
            wanted.values[static_cast<size_t>(n * kClasses + label)] = -1.0f / kBatch;
            if (step >= kSteps * 3 / 4) {
                right += best == label;
                seen += 1.0;
            }
        }
        CHECK(bs_softmax_backward(BS_SOFTMAX_LOG, BS_SOFTMAX_CHANNEL, 1.0, &likely.desc,
            likely.data(), &wanted.desc, wanted.data(), 0.0, &dz.desc, dz.data(), kThreads));
        scores.backward(d, dz, &d_mean);
        second.backward(b, mean.backward(c, d_mean), &d_halved);
        first.backward(images, halved.backward(a, d_halved), nullptr);
        for (Convolution *layer : {&first, &second, &scores})
            layer->descend();
        if (step % 10 == 0 || step == kSteps - 1)
            std::printf("step %2d  loss %.4f\n", step, loss);
    }
    std::printf("accuracy %.3f over the last quarter\n", right / seen);
    return 0;
}
