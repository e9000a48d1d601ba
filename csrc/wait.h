// How threads of this library wait.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace torchbeast {

using Clock = std::chrono::steady_clock;

// What a thread has to do around what takes long, called under no lock. Nothing in C++;
// in Python it gives the GIL away, and looks for Ctrl-C.
class Blocking {
 public:
  // Before the thread waits, or works for long. May be called again.
  virtual void begin() = 0;

  // Ten times a second while it waits. What it throws ends the call.
  virtual void poll() = 0;

  static constexpr std::chrono::milliseconds kPollEvery{100};

 protected:
  ~Blocking() = default;
};

// Waits for condition() until `until`. Returns condition().
template <typename Condition>
bool wait(std::unique_lock<std::mutex>* lock, std::condition_variable* changed,
          Blocking* blocking, std::optional<Clock::time_point> until,
          Condition condition) {
  if (condition()) return true;
  if (blocking != nullptr) {
    lock->unlock();
    blocking->begin();
    lock->lock();
  }
  auto next_poll = Clock::now() + Blocking::kPollEvery;
  while (!condition()) {
    if (blocking == nullptr && !until) {
      changed->wait(*lock);
      continue;
    }
    auto wake = until.value_or(next_poll);
    if (blocking != nullptr) wake = std::min(wake, next_poll);
    if (changed->wait_until(*lock, wake) == std::cv_status::no_timeout) continue;
    if (until && Clock::now() >= *until) return condition();
    if (blocking != nullptr && Clock::now() >= next_poll) {
      lock->unlock();
      blocking->poll();
      lock->lock();
      next_poll = Clock::now() + Blocking::kPollEvery;
    }
  }
  return true;
}

}  // namespace torchbeast
