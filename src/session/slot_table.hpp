#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/clock.hpp"
#include "kvshard/copy_engine.hpp"
#include "wire/messages.hpp"

namespace kvshard {

/// A prefill rank's staging slots: free > gathering > gathered > exposed > free. The generation rises whenever a
/// slot is given out, so that whoever still reads an older one can be told apart.
///
/// Slots in use are released by their owner; a slot whose gather still runs when its lease ends becomes
/// free only after the gather.
class SlotTable {
 public:
  enum class State : std::uint8_t { free, gathering, gathered, exposed };

  /// Hears the end of a slot's gather.
  class Owner {
   public:
    virtual void slot_gathered(std::uint32_t slot, Status status) noexcept = 0;

   protected:
    ~Owner() = default;
  };

  struct Slot final : CopyListener {
    Slot(Owner& owner_, std::uint32_t index_, std::byte* memory_) noexcept
        : owner{owner_}, index{index_}, memory{memory_} {}
    void copy_done(Status status) noexcept override {
      owner.slot_gathered(index, std::move(status));
    }

    Owner& owner;
    std::uint32_t index;
    std::byte* memory;
    State state{State::free};
    std::uint64_t generation{0};
    std::uint64_t lease{0};  ///< 0: its lease has ended
    std::uint64_t piece{0};
    RoomId room{};      ///< whose pages the gather reads
    wire::Ready ready;  ///< sent once gathered
    TimePoint gathering_at{}, exposed_at{};
    Duration waited{};  ///< its piece, for a slot
  };

  SlotTable(Owner& owner, std::byte* memory, std::uint32_t count, std::uint64_t stride) {
    for (std::uint32_t i = 0; i < count; ++i) {
      slots_.emplace_back(owner, i, memory + i * stride);
      free_.push_back(i);
    }
  }

  [[nodiscard]] bool available() const noexcept { return !free_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] std::size_t in_use() const noexcept { return slots_.size() - free_.size(); }
  [[nodiscard]] Slot& operator[](std::uint32_t index) noexcept { return slots_[index]; }
  [[nodiscard]] auto begin() noexcept { return slots_.begin(); }
  [[nodiscard]] auto end() noexcept { return slots_.end(); }

  /// Requires available().
  Slot& take(std::uint64_t lease, std::uint64_t piece) {
    Slot& slot = slots_[free_.back()];
    free_.pop_back();
    slot.state = State::gathering;
    ++slot.generation;
    slot.lease = lease;
    slot.piece = piece;
    return slot;
  }
  void give_back(Slot& slot) {
    slot.state = State::free;
    slot.lease = 0;
    free_.push_back(slot.index);
  }

 private:
  std::deque<Slot> slots_;  // listeners stay where they are
  std::vector<std::uint32_t> free_;
};

}  // namespace kvshard
