#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/types.hpp"
#include "support/patterned_pool.hpp"

namespace kvshard::test {

/// Where one byte of a request's KV belongs in the model, whoever holds it.
struct ModelByte {
  std::uint32_t group{0};
  std::uint32_t layer{0};   // of the model
  std::uint32_t buffer{0};  // K or V
  std::uint32_t head{0};    // of the model
  std::uint64_t token{0};   // of the request
  std::uint32_t at{0};      // in the head's row
};

inline std::byte model_byte(std::uint64_t request, const ModelByte& which) {
  return content_byte({.request = request, .generation = which.group + 1},
                      which.layer * 64 + which.buffer * 32 + which.head,
                      static_cast<std::uint32_t>(which.token), which.at);
}

/// One table's pages of a request on one side: who has which page at which position.
struct TablePages {
  std::uint32_t base{0};
  std::vector<LogicalPage> pages;  // by position, as an engine numbers them

  /// `positions` pages scattered over the ranks' pools; every rank computes the same from one seed.
  static TablePages draw(const BufferGroup& group, std::uint64_t positions, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    const bool by_page = group.stripe() == group.page_size;
    const std::uint32_t owners = by_page ? group.parts : 1;
    const PageLayout layout = PageLayout::create(owners, group.page_size).value();
    TablePages made{.base = static_cast<std::uint32_t>(random() % owners), .pages = {}};
    std::vector<std::vector<std::uint32_t>> local(owners);
    for (auto& pages : local) {
      pages.resize(group.page_count - 1);
      std::iota(pages.begin(), pages.end(), 1U);
      std::shuffle(pages.begin(), pages.end(), random);
    }
    for (std::uint64_t p = 0; p < positions; ++p) {
      auto& pages = local[(made.base + p) % owners];
      made.pages.push_back(layout.logical(static_cast<std::uint32_t>((made.base + p) % owners),
                                          LocalPage{pages.back()}));
      pages.pop_back();
    }
    return made;
  }
};

/// A rank's pool, byte by byte of the model: the slow and obvious way to say what lies where.
class ModelPool {
 public:
  explicit ModelPool(Geometry geometry) : geometry_{std::move(geometry)} {
    for (const BufferGroup& group : geometry_.groups) {
      auto& buffers = memory_.emplace_back();
      const Strides at{group};
      for (std::uint32_t b = 0; b < group.buffers(); ++b)
        buffers.emplace_back(at.page * group.page_count, kCanary);
    }
  }

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] Pool pool() {
    Pool pool{geometry_, {}};
    for (auto& buffers : memory_) {
      auto& pointers = pool.buffers.emplace_back();
      for (auto& buffer : buffers) pointers.push_back(buffer.data());
    }
    return pool;
  }

  /// Writes the bytes of this rank of all tokens below `end`. `tables` by table number.
  void fill(std::uint64_t request, const std::vector<TablePages>& tables,
            const std::vector<std::uint64_t>& end) {
    each_byte(tables, end,
              [&](const ModelByte& which, std::byte& byte) { byte = model_byte(request, which); });
  }

  /// Exactly the tokens [first, end) of each table have arrived; all else is a canary.
  [[nodiscard]] ::testing::AssertionResult holds(std::uint64_t request,
                                                 const std::vector<TablePages>& tables,
                                                 const std::vector<std::uint64_t>& first,
                                                 const std::vector<std::uint64_t>& end) {
    auto copy = memory_;
    ::testing::AssertionResult result = ::testing::AssertionSuccess();
    each_byte(tables, end, [&](const ModelByte& which, std::byte& byte) {
      if (which.token < first[geometry_.groups[which.group].table]) return;
      if (byte != model_byte(request, which) && result) {
        result = ::testing::AssertionFailure()
                 << "group " << which.group << " layer " << which.layer << " buffer "
                 << which.buffer << " head " << which.head << " token " << which.token << " byte "
                 << which.at << (byte == kCanary ? " is a canary" : " is wrong");
      }
      byte = kCanary;  // so that what is left must be canaries
    });
    for (std::size_t g = 0; g < memory_.size() && result; ++g) {
      for (std::size_t b = 0; b < memory_[g].size() && result; ++b) {
        const auto stray =
            std::ranges::find_if(memory_[g][b], [](std::byte byte) { return byte != kCanary; });
        if (stray != memory_[g][b].end()) {
          result = ::testing::AssertionFailure() << "group " << g << " buffer " << b << ": byte "
                                                 << stray - memory_[g][b].begin() << " was written";
        }
      }
    }
    memory_ = std::move(copy);
    return result;
  }

 private:
  struct Strides {
    explicit Strides(const BufferGroup& group) {
      const bool tokens_outside = group.order == PageOrder::token_major;
      token = group.token_stride != 0 ? group.token_stride
              : tokens_outside        ? std::uint64_t{group.heads} * group.head_bytes
                                      : group.head_bytes;
      head = group.head_stride != 0 ? group.head_stride
             : tokens_outside       ? group.head_bytes
                                    : std::uint64_t{group.page_size} * group.head_bytes;
      page = group.page_stride != 0 ? group.page_stride : group.page_bytes();
    }
    std::uint64_t token, head, page;
  };

  void each_byte(const std::vector<TablePages>& tables, const std::vector<std::uint64_t>& end,
                 const std::function<void(const ModelByte&, std::byte&)>& visit) {
    for (std::uint32_t g = 0; g < geometry_.groups.size(); ++g) {
      const BufferGroup& group = geometry_.groups[g];
      const Strides at{group};
      const TablePages& table = tables[group.table];
      const bool by_page = group.stripe() == group.page_size;
      for (std::uint64_t token = 0; token < end[group.table]; ++token) {
        std::uint64_t page = 0, offset = 0;
        if (by_page) {
          const auto logical = table.pages[token / group.page_size];
          if (index(logical) % group.parts != group.part) continue;
          page = index(logical) / group.parts;
          offset = token % group.page_size;
        } else {
          if (token / group.interleave % group.parts != group.part) continue;
          const std::uint64_t span = std::uint64_t{group.page_size} * group.parts;
          page = index(table.pages[token / span]);
          offset = token % span / (group.interleave * group.parts) * group.interleave +
                   token % group.interleave;
        }
        for (std::uint32_t b = 0; b < group.buffers(); ++b)
          for (std::uint32_t h = 0; h < group.heads; ++h)
            for (std::uint32_t i = 0; i < group.head_bytes; ++i)
              visit({g, group.first_layer + b / group.buffers_per_layer,
                     b % group.buffers_per_layer, group.first_head + h, token, i},
                    memory_[g][b][page * at.page + offset * at.token + h * at.head + i]);
      }
    }
  }

  Geometry geometry_;
  std::vector<std::vector<std::vector<std::byte>>> memory_;
};

}  // namespace kvshard::test
