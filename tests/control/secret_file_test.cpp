#include "control/secret_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/log.hpp"
#include "support/temporary_folder.hpp"

namespace kvshard {
namespace {

namespace fs = std::filesystem;

class SecretFileTest : public testing::Test {
 protected:
  SecretFileTest() {
    lines().clear();
    set_log_hook(
        [](void*, LogLevel, std::string_view line) noexcept { lines().emplace_back(line); },
        nullptr);
  }
  ~SecretFileTest() override { set_log_hook(nullptr, nullptr); }

  // As an operator should: a new file takes the old one's name.
  void write(std::string_view text, mode_t mode = 0600) const {
    const fs::path fresh = folder_.path() / "fresh";
    std::ofstream{fresh, std::ios::binary} << text;
    ASSERT_EQ(::chmod(fresh.c_str(), mode), 0);
    fs::rename(fresh, path_);
  }
  std::string refusal() const {
    const auto opened = SecretFile::open(path_);
    if (opened) return "accepted";
    EXPECT_EQ(opened.error().code, ErrorCode::invalid_argument);
    const std::string prefix = "secret file " + path_.string() + ": ";
    EXPECT_EQ(opened.error().message.substr(0, prefix.size()), prefix);
    return opened.error().message.substr(prefix.size());
  }
  static wire::Mac mac(HmacKey& key) { return key.compute({}).value_or(wire::Mac{}); }
  static wire::Mac mac_of(std::string_view secret) {
    auto key = HmacKey::create(std::as_bytes(std::span{secret}));
    return mac(*key);
  }
  static std::vector<std::string>& lines() {
    static std::vector<std::string> logged;
    return logged;
  }

  test::TemporaryFolder folder_{"secret"};
  fs::path path_{folder_.path() / "secret"};
};

constexpr std::string_view kOne = "0123456789abcdef";
constexpr std::string_view kTwo = "fedcba9876543210";

TEST_F(SecretFileTest, ReadsOneOrTwoLines) {
  for (const std::string_view text :
       {"0123456789abcdef", "0123456789abcdef\n", "0123456789abcdef\nfedcba9876543210",
        "0123456789abcdef\nfedcba9876543210\n"}) {
    write(text);
    auto file = SecretFile::open(path_);
    ASSERT_TRUE(file) << file.error().message;
    const auto secrets = file->current();
    ASSERT_EQ(secrets->size(), text.size() > 20 ? 2U : 1U);
    EXPECT_EQ(mac(secrets->front()), mac_of(kOne));
    EXPECT_EQ(mac(secrets->back()), mac_of(secrets->size() == 2 ? kTwo : kOne));
  }
}

TEST_F(SecretFileTest, RefusesWhatOthersCanReachNamingTheMode) {
  write(kOne, 0604);
  EXPECT_EQ(refusal(), "its mode 0604 lets others at it, or the group write; make it 0600");
  for (const mode_t mode : {0644U, 0602U, 0601U, 0620U}) {
    write(kOne, mode);
    EXPECT_NE(refusal(), "accepted") << mode;
  }
  write(kOne, 0440);  // a group may read it: a mounted secret, say
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(SecretFileTest, RefusesWhatIsNoFileOrNoSecretNamingWhy) {
  EXPECT_EQ(refusal(), "No such file or directory");
  fs::create_directory(path_);
  EXPECT_EQ(refusal(), "it is no regular file");
  fs::remove(path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);  // must not wait for a writer
  EXPECT_EQ(refusal(), "it is no regular file");
  fs::remove(path_);
  write("");
  EXPECT_EQ(refusal(), "it is empty");
  write("0123456789abcde\n");
  EXPECT_EQ(refusal(), "line 1 has 15 bytes, not 16 to 4096");
  write(std::string{kOne} + "\n\n");
  EXPECT_EQ(refusal(), "line 2 has 0 bytes, not 16 to 4096");
  write(std::string(4097, 'x'));
  EXPECT_EQ(refusal(), "line 1 has 4097 bytes, not 16 to 4096");
  write("0123456789abcdef\n0123456789abcdef\n0123456789abcdef\n");
  EXPECT_EQ(refusal(), "more than 2 lines");
  write(std::string(20'000, 'x'));
  EXPECT_EQ(refusal(), "more than 8194 bytes");
  write(std::string(4096, 'x') + "\n" + std::string(4096, 'y') + "\n");
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(SecretFileTest, SeesAChangeAndKeepsTheLastSecretsWhileTheFileIsBad) {
  write(kOne);
  auto file = SecretFile::open(path_);
  ASSERT_TRUE(file);
  const auto first = file->current();
  EXPECT_EQ(file->current(), first);  // not read again
  write(kTwo);
  EXPECT_EQ(mac(file->current()->front()), mac_of(kTwo));
  EXPECT_EQ(mac(first->front()), mac_of(kOne));  // for connections that began with it

  lines().clear();
  write("short");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(mac(file->current()->front()), mac_of(kTwo));
  fs::remove(path_);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(mac(file->current()->front()), mac_of(kTwo));
  ASSERT_EQ(lines().size(), 2U);  // once for each state of the file
  EXPECT_NE(lines()[0].find("line 1 has 5 bytes"), std::string::npos) << lines()[0];
  EXPECT_NE(lines()[1].find("No such file"), std::string::npos) << lines()[1];
  write(kOne);
  EXPECT_EQ(mac(file->current()->front()), mac_of(kOne));
}

TEST_F(SecretFileTest, NeverShowsASecret) {
  write(std::string{kOne} + "\n" + std::string{kTwo.substr(0, 12)});
  EXPECT_EQ(refusal().find("fedcba"), std::string::npos);
  write(kOne);
  auto file = SecretFile::open(path_);
  ASSERT_TRUE(file);
  write(kTwo);
  (void)file->current();
  for (const std::string& line : lines()) {
    EXPECT_EQ(line.find(kOne.substr(0, 6)), std::string::npos) << line;
    EXPECT_EQ(line.find(kTwo.substr(0, 6)), std::string::npos) << line;
  }
}

}  // namespace
}  // namespace kvshard
