#include "registry/http.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>
#include <vector>

#include "support/raw_peer.hpp"

namespace kvshard::http {
namespace {

using namespace std::chrono_literals;
using kvshard::testing::RawListener;
using kvshard::testing::RawPeer;
using Kind = MessageReader::Kind;

TimePoint in(Duration time) {
  return SteadyClock::instance().now() + time;
}

std::unique_ptr<Server> echo_server() {
  auto server = Server::start({"127.0.0.1", 0}, [](const Request& request) {
    return Response{200, "text/plain", request.method + " " + request.target + " " + request.body};
  });
  EXPECT_TRUE(server.ok()) << (server.ok() ? "" : server.error().message);
  return std::move(server).value();
}

TEST(AddressTest, ReadsWhatPeopleWrite) {
  for (const char* text : {"10.0.0.1:80", "http://10.0.0.1:80", "http://10.0.0.1:80/"}) {
    const auto address = parse_address(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(to_string(address.value()), "10.0.0.1:80");
  }
  const auto v6 = parse_address("[::1]:9");
  ASSERT_TRUE(v6);
  EXPECT_EQ(v6.value().host, "::1");
  EXPECT_EQ(to_string(v6.value()), "[::1]:9");
}

TEST(AddressTest, RefusesWhatCannotBeOne) {
  for (const char* text : {"", "host", ":80", "host:", "host:70000", "host:-1", "ho st:80",
                           "::1:80", "a\r\nb:80", "https://host:80/x", "host:80x"}) {
    const auto address = parse_address(text);
    ASSERT_FALSE(address) << text;
    EXPECT_EQ(address.error().code, ErrorCode::invalid_argument) << text;
  }
}

TEST(MessageReaderTest, IsTheSameForEverySplit) {
  const std::string message = "POST /a HTTP/1.1\r\nHost: x\r\ncontent-LENGTH:  5 \r\n\r\nhello";
  for (std::size_t cut = 0; cut <= message.size(); ++cut) {
    MessageReader reader{Kind::request};
    const auto first = reader.feed(std::string_view{message}.substr(0, cut));
    ASSERT_TRUE(first);
    EXPECT_EQ(first.value(), cut == message.size());
    const auto second = reader.feed(std::string_view{message}.substr(cut));
    ASSERT_TRUE(second);
    EXPECT_TRUE(second.value()) << cut;
    EXPECT_EQ(reader.start_line(), "POST /a HTTP/1.1");
    EXPECT_EQ(reader.take_body(), "hello");
  }
}

TEST(MessageReaderTest, AResponseWithoutALengthEndsWithTheConnection) {
  MessageReader reader{Kind::response};
  EXPECT_FALSE(reader.whole_at_end());
  ASSERT_TRUE(reader.feed("HTTP/1.0 200 OK\r\n\r\nab"));
  ASSERT_TRUE(reader.feed("cd"));
  EXPECT_TRUE(reader.whole_at_end());
  EXPECT_EQ(reader.take_body(), "abcd");
}

TEST(MessageReaderTest, KeepsNothingBeyondItsLimits) {
  MessageReader endless{Kind::request};
  const std::string line = "GET / HTTP/1.1\r\n" + std::string(kMaxHeadBytes, 'a');
  const auto head = endless.feed(line);
  ASSERT_FALSE(head);
  EXPECT_EQ(head.error().code, ErrorCode::resource_exhausted);

  MessageReader announced{Kind::request};
  const auto length = announced.feed("POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n");
  ASSERT_FALSE(length);
  EXPECT_EQ(length.error().code, ErrorCode::resource_exhausted);
  EXPECT_NE(length.error().message.find("99999999999"), std::string::npos);

  MessageReader unannounced{Kind::response};
  ASSERT_TRUE(unannounced.feed("HTTP/1.0 200 OK\r\n\r\n"));
  ASSERT_TRUE(unannounced.feed(std::string(kMaxResponseBodyBytes, 'x')));
  EXPECT_FALSE(unannounced.feed("x"));
}

TEST(MessageReaderTest, RefusesHeadersThatTwoReadersCouldReadTwoWays) {
  for (const char* headers :
       {"Content-Length: 1\r\nContent-Length: 2", "Content-Length: -1", "Content-Length: 1x",
        "Content-Length:", "Transfer-Encoding: chunked", "no colon", ": no name"}) {
    MessageReader reader{Kind::request};
    const auto read = reader.feed(std::string{"POST / HTTP/1.1\r\n"} + headers + "\r\n\r\n");
    ASSERT_FALSE(read) << headers;
    EXPECT_EQ(read.error().code, ErrorCode::data_loss) << headers;
  }
}

TEST(HttpTest, CarriesARequestAndItsAnswer) {
  const auto server = echo_server();
  const std::string body(300'000, 'b');  // more than one read, on both sides
  const auto response = fetch(server->address(), {"POST", "/x", body}, in(10s), {});
  ASSERT_TRUE(response) << response.error().message;
  EXPECT_EQ(response.value().status, 200);
  EXPECT_EQ(response.value().body, "POST /x " + body);
}

// acceptance 45: nobody there, or nobody who answers
TEST(HttpTest, ADeadOrSilentServerCostsNoMoreThanTheDeadline) {
  std::uint16_t dead_port = 0;
  { dead_port = RawListener{}.port(); }
  const auto dead = fetch({"127.0.0.1", dead_port}, {"GET", "/", {}}, in(10s), {});
  ASSERT_FALSE(dead);
  EXPECT_EQ(dead.error().code, ErrorCode::unavailable);

  const RawListener silent;
  const auto start = SteadyClock::instance().now();
  const auto late = fetch({"127.0.0.1", silent.port()}, {"GET", "/", {}}, start + 50ms, {});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::deadline_exceeded);
  EXPECT_LT(SteadyClock::instance().now() - start, 5s);
}

TEST(HttpTest, AServerThatDripsBytesDoesNotMoveTheDeadline) {
  const RawListener listener;
  const std::jthread drip{[&listener] {
    const RawPeer peer = listener.accept();
    peer.send("HTTP/1.0 200 OK\r\n\r\n");
    while (peer.send("x")) ::poll(nullptr, 0, 1);  // until the caller has gone
  }};
  const auto response = fetch({"127.0.0.1", listener.port()}, {"GET", "/", {}}, in(100ms), {});
  ASSERT_FALSE(response);
  EXPECT_EQ(response.error().code, ErrorCode::deadline_exceeded);
}

TEST(HttpTest, AStopRequestEndsAFetch) {
  const RawListener silent;
  std::stop_source source;
  std::jthread stopper{[&] {
    const RawPeer peer = silent.accept();  // the fetch is under way
    source.request_stop();
    (void)peer.receive_all();
  }};
  const auto response =
      fetch({"127.0.0.1", silent.port()}, {"GET", "/", {}}, in(60s), source.get_token());
  ASSERT_FALSE(response);
  EXPECT_EQ(response.error().code, ErrorCode::cancelled);
}

TEST(HttpTest, WhatIsNoHttpIsUnavailable) {
  for (const char* answer :
       {"", "garbage\r\n\r\n", "HTTP/1.0 2x0 OK\r\n\r\n",
        "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nshort", "SSH-2.0-OpenSSH_9.2\r\n"}) {
    const RawListener listener;
    const std::jthread peer{[&] { listener.accept().send(answer); }};
    const auto response = fetch({"127.0.0.1", listener.port()}, {"GET", "/", {}}, in(10s), {});
    ASSERT_FALSE(response) << answer;
    EXPECT_EQ(response.error().code, ErrorCode::unavailable) << answer;
  }
}

TEST(HttpServerTest, AnswersNonsenseWithAnErrorAndGoesOn) {
  const auto server = echo_server();
  const std::string huge =
      "POST / HTTP/1.1\r\nContent-Length: 600000\r\n\r\n" + std::string(600'000, 'x');
  for (const auto& [bytes, status] : std::vector<std::pair<std::string, std::string>>{
           {"\r\n\r\n", "400"},
           {"GET\r\n\r\n", "400"},
           {"GET / SMTP\r\n\r\n", "400"},
           {std::string("\0\xff\xfe\r\n\r\n", 7), "400"},
           {"GET / HTTP/1.1\r\n" + std::string(20'000, 'a'), "413"},
           {huge, "413"}}) {
    const RawPeer peer = RawPeer::connect(server->address().port);
    peer.send(bytes);
    peer.finish_sending();
    const std::string answer = peer.receive_all();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + status))
        << bytes.substr(0, 40) << " -> " << answer;
  }
  EXPECT_TRUE(fetch(server->address(), {"GET", "/", {}}, in(10s), {}));
}

TEST(HttpServerTest, PeersThatSayNothingHoldUpNeitherOthersNorTheEnd) {
  auto server = echo_server();
  std::vector<RawPeer> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(RawPeer::connect(server->address().port));
    silent.back().send("GET / HT");
  }
  EXPECT_TRUE(fetch(server->address(), {"GET", "/", {}}, in(10s), {}));
  const auto start = SteadyClock::instance().now();
  server.reset();
  EXPECT_LT(SteadyClock::instance().now() - start, kExchangeTimeout / 2);
}

TEST(HttpServerTest, LeavesTheProcessesSignalsAlone) {
  struct sigaction before {};
  struct sigaction after {};
  ::sigaction(SIGPIPE, nullptr, &before);
  {
    const auto server = echo_server();
    EXPECT_TRUE(fetch(server->address(), {"GET", "/", {}}, in(10s), {}));
  }
  ::sigaction(SIGPIPE, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST(HttpServerTest, SaysWhyAnAddressCannotBeBound) {
  const auto server = echo_server();
  const auto second = Server::start(server->address(), [](const Request&) { return Response{}; });
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::unavailable);
  EXPECT_NE(second.error().message.find(to_string(server->address())), std::string::npos);
}

}  // namespace
}  // namespace kvshard::http
