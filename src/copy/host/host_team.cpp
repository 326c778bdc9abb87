#include "copy/host/host_team.hpp"

namespace kvshard {

HostTeam::HostTeam(std::uint32_t helpers) {
  helpers_.reserve(helpers);
  for (std::uint32_t i = 0; i < helpers; ++i)
    helpers_.emplace_back([this](const std::stop_token& stop) { help(stop); });
}

HostTeam::~HostTeam() {
  for (std::jthread& helper : helpers_) helper.request_stop();
  const MutexLock lock{mutex_};  // no helper is between its look at the stop token and its wait
  wake_.notify_all();
}

void HostTeam::run(std::uint64_t blocks, Task task, void* context) noexcept {
  next_block_.store(0, std::memory_order_relaxed);
  if (helpers_.empty()) return work(blocks, task, context);
  {
    const MutexLock lock{mutex_};
    ++round_;
    open_ = true;
    blocks_ = blocks;
    task_ = task;
    context_ = context;
  }
  wake_.notify_all();
  work(blocks, task, context);
  const MutexLock lock{mutex_};
  open_ = false;
  while (busy_ != 0) idle_.wait(mutex_);
}

void HostTeam::help(const std::stop_token& stop) noexcept {
  std::uint64_t seen = 0;
  const MutexLock lock{mutex_};
  for (;;) {
    while (!open_ || round_ == seen) {
      if (stop.stop_requested()) return;
      wake_.wait(mutex_);
    }
    seen = round_;
    ++busy_;
    const std::uint64_t blocks = blocks_;
    const Task task = task_;
    void* const context = context_;
    mutex_.unlock();
    work(blocks, task, context);
    mutex_.lock();
    if (--busy_ == 0) idle_.notify_one();
  }
}

void HostTeam::work(std::uint64_t blocks, Task task, void* context) noexcept {
  for (;;) {
    const std::uint64_t block = next_block_.fetch_add(1, std::memory_order_relaxed);
    if (block >= blocks) return;
    task(context, block);
  }
}

}  // namespace kvshard
