#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace mflex {
namespace {

constexpr int kMaxThreads = 256;

class Pool {
 public:
  void run(int parts, const std::function<void(int)>& part) {
    std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner.owns_lock() || parts <= 1) {
      for (int p = 0; p < parts; ++p) part(p);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start(parts - 1);
      part_ = &part;
      helpers_ = parts - 1;
      pending_ = helpers_;
      ++generation_;
    }
    wake_.notify_all();
    part(parts - 1);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
    part_ = nullptr;
  }

 private:
  // Signals are for the program's own threads: these are born with all of them blocked.
  void start(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started_ < wanted; ++started_) std::thread(&Pool::work, this, started_).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(int index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // A thread that is born between two jobs must not take up one that has ended.
      wake_.wait(lock, [&] { return generation_ != seen && part_ != nullptr; });
      seen = generation_;
      if (index >= helpers_) continue;
      const std::function<void(int)>* part = part_;
      lock.unlock();
      (*part)(index);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_;   // held by the caller that uses the threads
  std::mutex mutex_;  // guards everything below
  std::condition_variable wake_, done_;
  const std::function<void(int)>* part_ = nullptr;
  uint64_t generation_ = 0;
  int started_ = 0, helpers_ = 0, pending_ = 0;
};

// Never destroyed: its threads may still wait on it while the process exits. A forked child has
// none of the threads and takes a new pool.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static std::once_flag registered;
  std::call_once(registered, [] {
    pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_release); });
  });
  Pool* made = new Pool;
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

}  // namespace

int available_threads() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return 1;
  return std::max(1, CPU_COUNT(&mask));
}

void parallel_for(int64_t count, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (threads <= 0) threads = available_threads();
  const int64_t grains = (count - 1) / grain + 1;
  const int parts = static_cast<int>(std::min<int64_t>({threads, grains, kMaxThreads}));
  if (parts <= 1) {
    body(0, count);
    return;
  }
  pool().run(parts, [&](int p) {
    const int64_t begin = grains / parts * p + std::min<int64_t>(p, grains % parts);
    const int64_t end = begin + grains / parts + (p < grains % parts ? 1 : 0);
    body(begin * grain, std::min(end * grain, count));
  });
}

}  // namespace mflex
