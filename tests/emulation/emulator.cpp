// MMLAPLACE_EMULATED_ORDER tells which of the threads that can go on does:
// `forwards` (the default) the first, `backwards` the last, `random` any.
#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

dim3 gridDim, blockDim;
uint3 blockIdx, threadIdx;

namespace emulator {

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kNaN = 0xff;  // all bytes of a number that is none

// A stack and what runs on it. The compiler's own jumps are 20 times faster
// than swapcontext, which asks the system for a signal mask.
class Fiber {
 public:
  explicit Fiber(size_t stack_bytes)
      : stack_(new char[stack_bytes]), stack_bytes_(stack_bytes) {}
  // The scheduler, on the stack of whoever launched the kernel.
  Fiber() = default;

  void prepare(void (*function)()) {
    started_ = false;
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.get();
    start_.uc_stack.ss_size = stack_bytes_;
    makecontext(&start_, function, 0);
  }

  [[gnu::noinline]] void switch_to(Fiber& other) {
    started_ = true;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(
        &fake_stack_, other.stack_ ? other.stack_.get() : other.known_stack_,
        other.stack_bytes_);
#endif
    if (__builtin_setjmp(place_) == 0) {
      other.go_on();
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // The first that is done on a new stack. Tells AddressSanitizer, and learns
  // from it where the stack of `from`, the fiber before, is.
  static void arrive([[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(
        nullptr, &from.known_stack_, &from.stack_bytes_);
#endif
  }

 private:
  [[gnu::noinline, gnu::no_sanitize_address]] void go_on() {
    if (started_) {
      __builtin_longjmp(place_, 1);
    }
    setcontext(&start_);
  }

  ucontext_t start_;
  bool started_;
  void* place_[5];
  std::unique_ptr<char[]> stack_;
  const void* known_stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
};

struct Copy {
  void* target;
  const void* source;
  size_t bytes;
};

struct Thread {
  Fiber fiber{kStackBytes};
  uint3 index;
  size_t number;  // in the block
  bool done;
  Site site;  // where it waits
  int exchanges;
  std::deque<std::vector<Copy>> copies;  // in groups, the last one open
};

// Threads that meet, a block or a warp: those from first up to last.
struct Group {
  size_t first;
  size_t last;
  size_t waiting = 0;
  Site site{};
};

// A set of the threads of a block.
class ThreadSet {
 public:
  static constexpr size_t kCapacity = 1024;

  void clear() {
    *this = ThreadSet();
  }
  void insert(size_t thread) {
    words_[thread / 64] |= uint64_t(1) << thread % 64;
  }
  void erase(size_t thread) {
    words_[thread / 64] &= ~(uint64_t(1) << thread % 64);
  }
  // The first that is not before `thread`, or kCapacity.
  size_t first(size_t thread = 0) const {
    uint64_t word = words_[thread / 64] & ~uint64_t(0) << thread % 64;
    size_t index = thread / 64;
    while (word == 0 && ++index < kWords) {
      word = words_[index];
    }
    return word ? 64 * index + __builtin_ctzll(word) : kCapacity;
  }
  size_t last() const {
    size_t index = kWords - 1;
    while (words_[index] == 0) {
      --index;
    }
    return 64 * index + 63 - __builtin_clzll(words_[index]);
  }

 private:
  static constexpr size_t kWords = kCapacity / 64;
  uint64_t words_[kWords] = {};
};

struct Warp {
  Group group;
  // Two rounds, so that nobody waits for those who read the last one.
  alignas(16) char values[2][kWarpSize][kMaxValueBytes];
};

enum class Order { kForwards, kBackwards, kRandom };

struct Block {
  const std::function<void()>* kernel;
  std::deque<Thread> threads;  // as many as any launch had
  Group all;
  std::vector<Warp> warps;
  ThreadSet ready;  // those that are not done and do not wait
  std::unique_ptr<char[]> shared;
  Fiber scheduler;
  Thread* current;
  std::exception_ptr error;
  Order order;
  std::mt19937 generator;
};

std::unique_ptr<Block> block;

Order read_order() {
  const char* variable = std::getenv("MMLAPLACE_EMULATED_ORDER");
  const std::string name = variable ? variable : "forwards";
  if (name == "forwards") {
    return Order::kForwards;
  }
  if (name == "backwards") {
    return Order::kBackwards;
  }
  if (name == "random") {
    return Order::kRandom;
  }
  throw std::invalid_argument(
      "MMLAPLACE_EMULATED_ORDER must be forwards, backwards or random, got " +
      name);
}

std::string describe(const Thread& thread) {
  return "thread (" + std::to_string(thread.index.x) + ", " +
      std::to_string(thread.index.y) + ", " + std::to_string(thread.index.z) +
      ") of block " + std::to_string(blockIdx.x) + " at " +
      thread.site.file + ":" + std::to_string(thread.site.line);
}

// The number of a thread that can go on, or ThreadSet::kCapacity.
size_t choose_next() {
  const ThreadSet& ready = block->ready;
  const size_t first = ready.first();
  if (first == ThreadSet::kCapacity || block->order == Order::kForwards) {
    return first;
  }
  if (block->order == Order::kBackwards) {
    return ready.last();
  }
  const size_t chosen = ready.first(block->generator() % block->all.last);
  return chosen == ThreadSet::kCapacity ? first : chosen;
}

void run_thread() {
  Fiber::arrive(block->scheduler);
  Thread& thread = *block->current;
  try {
    (*block->kernel)();
  } catch (...) {
    block->error = std::current_exception();
  }
  thread.done = true;
  block->ready.erase(thread.number);
  thread.fiber.switch_to(block->scheduler);
}

void start_threads() {
  size_t number = 0;
  block->ready.clear();
  for (unsigned z = 0; z < blockDim.z; ++z) {
    for (unsigned y = 0; y < blockDim.y; ++y) {
      for (unsigned x = 0; x < blockDim.x; ++x) {
        if (number == block->threads.size()) {
          block->threads.emplace_back();
        }
        Thread& thread = block->threads[number];
        thread.index = {x, y, z};
        thread.number = number;
        thread.done = false;
        thread.exchanges = 0;
        thread.copies.assign(1, {});
        thread.fiber.prepare(run_thread);
        block->ready.insert(number++);
      }
    }
  }
  block->all = {0, number};
  block->warps.clear();
  for (size_t first = 0; first < number; first += kWarpSize) {
    block->warps.push_back(
        {{first, std::min(first + kWarpSize, number)}, {}});
    std::memset(block->warps.back().values, kNaN, sizeof(Warp::values));
  }
}

void run_block() {
  start_threads();
  for (size_t next; (next = choose_next()) != ThreadSet::kCapacity;) {
    block->current = &block->threads[next];
    threadIdx = block->current->index;
    block->scheduler.switch_to(block->current->fiber);
    if (block->error) {
      std::rethrow_exception(block->error);
    }
  }
  for (size_t i = 0; i < block->all.last; ++i) {
    if (!block->threads[i].done) {
      throw std::runtime_error("some threads wait for others in vain: " +
                               describe(block->threads[i]));
    }
  }
}

void meet(Group& group, Site site) {
  Thread& thread = *block->current;
  thread.site = site;
  if (group.waiting > 0 && group.site.line != site.line) {
    throw std::runtime_error(
        "threads wait in different places: " + describe(thread) +
        ", others are at line " + std::to_string(group.site.line));
  }
  group.site = site;
  block->ready.erase(thread.number);
  if (++group.waiting == group.last - group.first) {
    group.waiting = 0;
    for (size_t i = group.first; i < group.last; ++i) {
      block->ready.insert(i);
    }
  }
  thread.fiber.switch_to(block->scheduler);
}

}  // namespace

void run(int64_t blocks, dim3 threads, size_t shared_bytes,
         const std::function<void()>& kernel) {
  if (!block) {
    block = std::make_unique<Block>();
  }
  try {
    block->kernel = &kernel;
    block->order = read_order();
    gridDim = dim3(blocks);
    blockDim = threads;
    for (int64_t index = 0; index < blocks; ++index) {
      blockIdx = {static_cast<unsigned>(index), 0, 0};
      block->shared.reset(new char[shared_bytes]);
      std::memset(block->shared.get(), kNaN, shared_bytes);
      run_block();
    }
  } catch (...) {
    block.reset();  // with the stacks of threads that have not ended
    throw;
  }
}

int lane() {
  return block->current->number % kWarpSize;
}

char* shared_memory() {
  return block->shared.get();
}

void meet_block(Site site) {
  meet(block->all, site);
}

const void* exchange(const void* value, size_t bytes, Site site) {
  Thread& thread = *block->current;
  Warp& warp = block->warps[thread.number / kWarpSize];
  auto& values = warp.values[thread.exchanges++ % 2];
  std::memcpy(values[lane()], value, bytes);
  meet(warp.group, site);
  return values;
}

void copy_async(void* target, const void* source, size_t bytes) {
  if (block->order == Order::kForwards) {
    std::memcpy(target, source, bytes);
  } else {
    block->current->copies.back().push_back({target, source, bytes});
  }
}

void commit_copies() {
  block->current->copies.emplace_back();
}

void wait_for_copies(size_t groups_left) {
  auto& copies = block->current->copies;
  for (; copies.size() > groups_left + 1; copies.pop_front()) {
    for (const Copy& copy : copies.front()) {
      std::memcpy(copy.target, copy.source, copy.bytes);
    }
  }
}

}  // namespace emulator
