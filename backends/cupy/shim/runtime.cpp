// Runs the threads of CUDA blocks on one CPU thread. Each is a fiber: it runs until it waits, at a barrier or in a shuffle, and the
// scheduler lets all go on once all wait. What would hang or be undefined on a device is reported: a barrier or a shuffle that not all of
// those concerned reach, at one line; a shuffle whose mask does not name exactly the threads that take part.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

struct Dim3 {
    unsigned x, y, z;
};
extern "C" Dim3 threadIdx, blockIdx;
Dim3 threadIdx, blockIdx;

namespace {

enum State { RUNNING, AT_BARRIER, IN_SHUFFLE, DONE };
enum Order { ASCENDING, DESCENDING, RANDOM };
const unsigned MOST = 1024, WARP = 32;
const size_t STACK = 256 << 10;

struct Thread {
    jmp_buf at;
    State state;
    bool started;
    char *stack;
    int line;
    // of a shuffle
    unsigned mask;
    int down, offset, width;
    unsigned long long value;
};

Thread threads[MOST];
jmp_buf scheduler;
unsigned current;
void (*entry)(void **);
void **arguments;
char message[256];

void wait() {
    if (!_setjmp(threads[current].at)) _longjmp(scheduler, 1);
}

void fiber() {
    for (;;) {
        entry(arguments);
        threads[current].state = DONE;
        wait();
    }
}

void resume(unsigned i) {
    Thread &t = threads[i];
    current = i;
    threadIdx = Dim3{i, 0, 0};
    t.state = RUNNING;
    if (_setjmp(scheduler)) return;
    if (t.started) _longjmp(t.at, 1);
    t.started = true;
    if (!t.stack) t.stack = (char *)malloc(STACK);
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = t.stack;
    start.uc_stack.ss_size = STACK;
    start.uc_link = 0;
    makecontext(&start, fiber, 0);
    setcontext(&start);
}

// Threads first to last are together; whether all wait at one line, in one way.
bool together(unsigned first, unsigned last, const char *what) {
    for (unsigned i = first; i < last; ++i)
        if (threads[i].state != threads[first].state || threads[i].line != threads[first].line) {
            snprintf(message, sizeof message, "threads %u and %u of block (%u, %u, %u) do not reach the same %s", first, i, blockIdx.x,
                     blockIdx.y, blockIdx.z, what);
            return false;
        }
    return true;
}

bool exchange(unsigned first) {
    unsigned long long out[WARP];
    const Thread &one = threads[first];
    if (one.mask != ~0u) {  // all threads of the warp are here
        snprintf(message, sizeof message, "a shuffle of all threads of a warp has the mask 0x%x", one.mask);
        return false;
    }
    for (unsigned i = 0; i < WARP; ++i) {
        int lane = (int)i % one.width, source = one.down ? lane + one.offset : lane ^ one.offset;
        out[i] = threads[first + (source < one.width ? (int)i - lane + source : (int)i)].value;
    }
    for (unsigned i = 0; i < WARP; ++i) threads[first + i].value = out[i];
    return true;
}

// All threads wait or are done: whether they may go on. `live` tells whether any has something left to do.
bool meet(unsigned count, bool &live) {
    bool barrier = false;
    live = false;
    for (unsigned i = 0; i < count; ++i) {
        barrier |= threads[i].state == AT_BARRIER;
        live |= threads[i].state != DONE;
    }
    if (barrier) return together(0, count, "barrier");
    for (unsigned first = 0; live && first < count; first += WARP) {
        if (!together(first, first + WARP, "shuffle")) return false;
        if (threads[first].state == IN_SHUFFLE && !exchange(first)) return false;
    }
    return true;
}

void run(unsigned count, Order order, unsigned &random) {
    unsigned turn[MOST], left = 0;
    for (unsigned i = 0; i < count; ++i)
        if (threads[i].state != DONE) turn[left++] = i;
    for (unsigned i = left; order == RANDOM && i > 1; --i) {
        random = random * 1664525u + 1013904223u;
        unsigned j = (random >> 8) % i, swap = turn[j];
        turn[j] = turn[i - 1];
        turn[i - 1] = swap;
    }
    for (unsigned i = 0; i < left; ++i) resume(turn[order == DESCENDING ? left - 1 - i : i]);
}

}  // namespace

extern "C" {

void shim_barrier(int line) {
    threads[current].state = AT_BARRIER;
    threads[current].line = line;
    wait();
}

unsigned long long shim_exchange(unsigned long long value, unsigned mask, int down, int offset, int width, int line) {
    Thread &t = threads[current];
    t.state = IN_SHUFFLE;
    t.line = line;
    t.mask = mask;
    t.down = down;
    t.offset = offset;
    t.width = width;
    t.value = value;
    wait();
    return threads[current].value;
}

// Run `kernel` for every block of a grid of x * y * z blocks of `count` threads, a multiple of 32. Returns a message, or 0 if all went well.
const char *shim_launch(void (*kernel)(void **), void **given, unsigned x, unsigned y, unsigned z, unsigned count, int order, unsigned seed) {
    entry = kernel;
    arguments = given;
    unsigned random = seed;
    for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
            for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z) {
                for (unsigned i = 0; i < count; ++i) threads[i].state = RUNNING;
                for (bool live = true; live;) {
                    run(count, (Order)order, random);
                    if (meet(count, live)) continue;
                    for (unsigned i = 0; i < count; ++i) threads[i].started = false;  // they wait in the middle of a kernel
                    return message;
                }
            }
    return 0;
}
}
