// Tests that the emulator sees what a card would not do, or not always.
#include "emulator.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

emulator::Site here(int line = __builtin_LINE()) {
  return {__FILE__, line};
}

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

std::string error_of(dim3 threads, const std::function<void()>& kernel) {
  try {
    emulator::run(2, threads, 0, kernel);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Each thread reads what its neighbour has written.
std::vector<int> shift(const char* order, bool with_barrier) {
  setenv("MMLAPLACE_EMULATED_ORDER", order, 1);
  std::vector<int> result(70);
  emulator::run(1, dim3(35, 2), 70 * sizeof(int), [&] {
    int* const shared = reinterpret_cast<int*>(emulator::shared_memory());
    const int thread = threadIdx.x + 35 * threadIdx.y;
    shared[thread] = thread;
    if (with_barrier) {
      emulator::meet_block(here());
    }
    result[thread] = shared[(thread + 1) % 70];
  });
  return result;
}

void test_order() {
  for (const char* order : {"forwards", "backwards", "random"}) {
    const std::vector<int> result = shift(order, true);
    for (int i = 0; i < 70; ++i) {
      require(result[i] == (i + 1) % 70, "what comes after a barrier");
    }
  }
  require(shift("forwards", false) != shift("backwards", false),
          "a missing barrier is seen");
}

void test_warps() {
  // The last warp has three threads.
  emulator::run(1, 67, 0, [] {
    const int lane = emulator::lane();
    for (float round = 0; round < 5; ++round) {
      const emulator::Values<float> values(lane + round, here());
      const int other = threadIdx.x < 64 ? 31 - lane : 2 - lane;
      require(values[other] == other + round, "values are exchanged");
      require(threadIdx.x < 64 || std::isnan(values[3]),
              "a lane without a thread has none");
    }
  });
}

void test_divergence() {
  require(error_of(40, [] {
            if (threadIdx.x == 3) {
              emulator::meet_block(here());
            } else {
              emulator::meet_block(here());
            }
          }).find("different places") != std::string::npos,
          "barriers in different places");
  require(error_of(40, [] {
            if (threadIdx.x != 3) {
              emulator::meet_block(here());
            }
          }).find("in vain") != std::string::npos,
          "a barrier that a thread passes by");
  require(error_of(40, [] { throw std::runtime_error("broken"); }) ==
              "broken",
          "what a thread raises");
  require(error_of(40, [] { emulator::meet_block(here()); }).empty(),
          "going on after errors");
}

void test_copies() {
  for (const char* order : {"forwards", "backwards"}) {
    setenv("MMLAPLACE_EMULATED_ORDER", order, 1);
    emulator::run(1, 1, 8, [&] {
      int* const shared = reinterpret_cast<int*>(emulator::shared_memory());
      const int source[2] = {1, 2};
      require(shared[0] == -1, "shared memory is NaN at first");
      emulator::copy_async(shared, source, 4);
      emulator::commit_copies();
      emulator::copy_async(shared + 1, source + 1, 4);
      emulator::commit_copies();
      emulator::wait_for_copies(1);
      require(shared[0] == 1, "a copy that was waited for");
      require(shared[1] == (order[0] == 'f' ? 2 : -1),
              "a copy that was not");
      emulator::wait_for_copies(0);
      require(shared[1] == 2, "the last copy");
    });
  }
}

}  // namespace

int main() {
  test_order();
  test_warps();
  test_divergence();
  test_copies();
}
