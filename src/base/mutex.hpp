#pragma once

#include <mutex>

// Lets clang prove locking (-Wthread-safety); other compilers see nothing.
#if defined(__clang__)
#define KVSHARD_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define KVSHARD_THREAD_ANNOTATION(x)
#endif
#define KVSHARD_CAPABILITY(x) KVSHARD_THREAD_ANNOTATION(capability(x))
#define KVSHARD_SCOPED_CAPABILITY KVSHARD_THREAD_ANNOTATION(scoped_lockable)
#define KVSHARD_GUARDED_BY(x) KVSHARD_THREAD_ANNOTATION(guarded_by(x))
#define KVSHARD_REQUIRES(x) KVSHARD_THREAD_ANNOTATION(requires_capability(x))
#define KVSHARD_ACQUIRE(...) KVSHARD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define KVSHARD_RELEASE(...) KVSHARD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

namespace kvshard {

/// std::mutex with annotations. BasicLockable, so std::condition_variable_any can wait on it.
class KVSHARD_CAPABILITY("mutex") Mutex {
 public:
  void lock() KVSHARD_ACQUIRE() { mutex_.lock(); }
  void unlock() KVSHARD_RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class KVSHARD_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) KVSHARD_ACQUIRE(mutex) : mutex_{mutex} { mutex_.lock(); }
  ~MutexLock() KVSHARD_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace kvshard
