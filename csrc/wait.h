// How threads of this library wait.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>

namespace torchbeast {

using Clock = std::chrono::steady_clock;

// What a blocked thread does ten times a second, holding no lock: nothing in C++, look
// for Ctrl-C in Python. What it throws ends the call that waits.
using Poll = std::function<void()>;
inline constexpr std::chrono::milliseconds kPollEvery{100};

// Waits for condition() until `until`. Returns condition().
template <typename Condition>
bool wait(std::unique_lock<std::mutex>* lock, std::condition_variable* changed,
          const Poll& poll, std::optional<Clock::time_point> until,
          Condition condition) {
  auto next_poll = Clock::now() + kPollEvery;
  while (!condition()) {
    if (!poll && !until) {
      changed->wait(*lock);
      continue;
    }
    const auto wake = !poll ? *until : !until ? next_poll : std::min(next_poll, *until);
    if (changed->wait_until(*lock, wake) == std::cv_status::no_timeout) continue;
    if (until && Clock::now() >= *until) return condition();
    if (poll && Clock::now() >= next_poll) {
      lock->unlock();
      poll();
      lock->lock();
      next_poll = Clock::now() + kPollEvery;
    }
  }
  return true;
}

}  // namespace torchbeast
