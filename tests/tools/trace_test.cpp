// kvshard-trace: what it reads, what it makes of made-up spans, and the program as a user runs it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/run_command.hpp"
#include "trace/picture.hpp"
#include "trace/summary.hpp"
#include "trace/trace.hpp"

namespace kvshard::trace {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kUs = 1000;

// Prefill ranks 0 and 1 and decode 0, each a process with a request lane and two slots.
Trace three_processes() {
  Trace trace{.boot_id = "boot", .processes = {}, .ranks = {}, .lanes = {}, .spans = {}};
  for (const char* const name : {"prefill 0", "prefill 1", "decode 0"}) {
    const std::size_t process = trace.processes.size();
    trace.processes.push_back({.pid = 100 + process, .name = name});
    trace.ranks.push_back({.process = process, .name = process == 2 ? "decode" : name});
    trace.lanes.push_back({.process = process, .tid = 1, .name = "requests"});
    for (std::uint64_t slot = 0; slot < 2; ++slot)
      trace.lanes.push_back({.process = process,
                             .tid = 2 + slot,
                             .name = trace.ranks[process].name +
                                     (process == 2 ? " landing " : " slot ") +
                                     std::to_string(slot)});
  }
  return trace;
}

// Times in us. A stage is on the prefill rank that is its source, or on decode 0.
Span request(Stage stage, std::uint32_t source, std::int64_t begin, std::int64_t end,
             std::uint64_t room = 7) {
  const std::size_t rank = on_prefill(stage) ? source : 2;
  return {.stage = stage,
          .source = source,
          .rank = rank,
          .lane = 3 * rank,
          .room = room,
          .pull = 1,
          .begin_ns = begin * kUs,
          .end_ns = end * kUs};
}
Span piece(Stage stage, std::uint32_t source, std::uint64_t number, std::int64_t begin,
           std::int64_t end, std::int64_t waited = 0) {
  Span span = request(stage, source, begin, end);
  span.lane += 1 + number % 2;
  span.piece = number;
  span.bytes = 1'000'000;
  span.waited_ns = waited * kUs;
  return span;
}

// A pull of 100 us from two ranks, of which the second is last; its stages are none at the same time.
Trace one_pull() {
  Trace trace = three_processes();
  trace.spans = {
      request(Stage::queue, 0, 0, 2),        request(Stage::connect, 0, 2, 5),
      request(Stage::wait, 0, 5, 20),        request(Stage::wait, 1, 5, 40),
      request(Stage::room, 1, 6, 16),        piece(Stage::gather, 0, 0, 10, 18),
      piece(Stage::wire, 0, 0, 20, 30),      piece(Stage::scatter, 0, 0, 30, 35),
      piece(Stage::gather, 1, 0, 28, 38, 4), piece(Stage::exposed, 1, 0, 38, 95),
      piece(Stage::wire, 1, 0, 48, 70, 6),   piece(Stage::scatter, 1, 0, 70, 90),
      request(Stage::skew, 0, 35, 90),       request(Stage::commit, 0, 90, 100),
      request(Stage::pull, 0, 0, 100),       request(Stage::lease, 1, 6, 95),
  };
  return trace;
}

TEST(TraceSummaryTest, EachMomentOfAPullIsSpentOnOneStageOfItsSlowestSource) {
  const Summary summary = summarize(one_pull());
  EXPECT_EQ(summary.pulls, 1U);
  EXPECT_EQ(summary.rooms, 1U);
  EXPECT_EQ(summary.bytes, 2'000'000U);
  EXPECT_EQ(summary.span_ns, 100 * kUs);
  const std::vector<std::pair<Stage, double>> expected{
      {Stage::queue, 0.02},   {Stage::connect, 0.03}, {Stage::room, 0.10},    {Stage::slot, 0.04},
      {Stage::gather, 0.10},  {Stage::exposed, 0.04}, {Stage::landing, 0.06}, {Stage::wire, 0.22},
      {Stage::scatter, 0.20}, {Stage::commit, 0.10},  {Stage::wait, 0.09}};
  double all = 0;
  for (const auto& [stage, share] : expected) {
    EXPECT_NEAR(summary.spent[stage], share, 1e-9) << to_string(stage);
    all += share;
  }
  EXPECT_NEAR(all, 1, 1e-9);
  ASSERT_EQ(summary.slowest.size(), 1U);
  EXPECT_EQ(summary.slowest[0].slowest, 1U);
  EXPECT_EQ(summary.slowest[0].rank, "decode 0");
  EXPECT_NEAR(summary.slowest[0].spent[Stage::wire], 0.22, 1e-9);
}

TEST(TraceSummaryTest, CountsStagesAndSources) {
  const Summary summary = summarize(one_pull());
  EXPECT_EQ(summary.stages[Stage::wire].count, 2U);
  EXPECT_EQ(summary.stages[Stage::wire].p50_ns, 10 * kUs);
  EXPECT_EQ(summary.stages[Stage::wire].p99_ns, 22 * kUs);
  EXPECT_EQ(summary.stages[Stage::wire].total_ns, 32e3);
  EXPECT_EQ(summary.stages[Stage::landing].max_ns, 6 * kUs);
  EXPECT_EQ(summary.stages[Stage::slot].max_ns, 4 * kUs);
  ASSERT_EQ(summary.sources.size(), 2U);
  EXPECT_EQ(summary.sources[0].slowest, 0U);
  EXPECT_EQ(summary.sources[1].slowest, 1U);
  EXPECT_EQ(summary.sources[1].pieces, 1U);
  EXPECT_EQ(summary.sources[1].wait.p50_ns, 35 * kUs);
  EXPECT_EQ(summary.sources[1].on_wire_ns, 22e3);
}

TEST(TraceSummaryTest, WireOverlapsCopiesOfOtherPieces) {
  // On the wire 20-30 and 48-70; copied meanwhile: 28-30.
  EXPECT_NEAR(summarize(one_pull()).overlap, 2.0 / 32, 1e-9);
}

TEST(TraceSummaryTest, TellsWhatSlotsDoWhileThereIsAPull) {
  Trace trace = one_pull();
  trace.spans.push_back(piece(Stage::exposed, 0, 1, 50, 150));  // the pull ends at 100
  const Summary summary = summarize(trace);
  ASSERT_EQ(summary.ranks.size(), 3U);
  EXPECT_EQ(summary.ranks[0].lanes.size(), 2U);
  EXPECT_NEAR(summary.ranks[0].busy[Stage::exposed], 0.25,
              1e-9);  // of two lanes, one half the time
  EXPECT_NEAR(summary.ranks[2].lanes[0].busy[Stage::scatter], 0.25, 1e-9);
}

// Both decode ranks call the pull of a room the same.
TEST(TraceSummaryTest, DecodeRanksArePulledApart) {
  Trace trace = one_pull();
  trace.processes.push_back({.pid = 200, .name = "decode 1"});
  trace.ranks.push_back({.process = 3, .name = "decode"});
  trace.lanes.push_back({.process = 3, .tid = 1, .name = "requests"});
  for (Span& span : trace.spans)
    if (of_a_piece(span.stage)) span.lease = 1;
  for (Span span : {request(Stage::pull, 0, 0, 50), piece(Stage::wire, 0, 0, 10, 40)}) {
    span.rank = 3;
    span.lane = 9;
    span.lease = of_a_piece(span.stage) ? 2 : 0;
    trace.spans.push_back(span);
  }
  Span gather = piece(Stage::gather, 0, 1, 2, 8);
  gather.lease = 2;
  trace.spans.push_back(gather);
  const Summary summary = summarize(trace);
  EXPECT_EQ(summary.pulls, 2U);
  ASSERT_EQ(summary.slowest.size(), 2U);
  EXPECT_EQ(summary.slowest[0].rank, "decode 0");
  EXPECT_EQ(summary.slowest[0].slowest, 1U);
  EXPECT_EQ(summary.slowest[1].rank, "decode 1");
  EXPECT_EQ(summary.slowest[1].slowest, 0U);
  EXPECT_EQ(summary.slowest[1].bytes, 1'000'000U);
  EXPECT_NEAR(summary.slowest[1].spent[Stage::gather], 6.0 / 50, 1e-9);  // not the other's 10 to 18
}

TEST(TraceSummaryTest, TakesOneRoomAloneWhenTold) {
  Trace trace = one_pull();
  trace.spans.push_back(request(Stage::pull, 0, 200, 900, 8));
  EXPECT_EQ(summarize(trace).slowest[0].room, 8U);
  const Summary summary = summarize(trace, 7);
  EXPECT_EQ(summary.pulls, 1U);
  EXPECT_EQ(summary.slowest[0].room, 7U);
  EXPECT_EQ(summarize(trace, 9).rooms, 0U);
}

TEST(TraceSummaryTest, KeepsTheSlowestOfMany) {
  Trace trace = three_processes();
  for (std::int64_t i = 0; i < 200; ++i)
    trace.spans.push_back(
        request(Stage::pull, 0, 0, 1 + i * 73 % 200, static_cast<std::uint64_t>(i)));
  const Summary summary = summarize(trace);
  ASSERT_EQ(summary.slowest.size(), Summary::kSlowest);
  for (std::int64_t i = 0; i < 5; ++i)
    EXPECT_EQ(summary.slowest[static_cast<std::size_t>(i)].ns, (200 - i) * kUs);
}

// What decides is made to be 90 of 100 us; the sentence must say so and tell what to change.
TEST(TraceSummaryTest, TheVerdictNamesTheStageAndWhatToChange) {
  const auto verdict_on = [](std::vector<Span> spans) {
    Trace trace = three_processes();
    spans.push_back(request(Stage::pull, 0, 0, 100));
    trace.spans = std::move(spans);
    return verdict(summarize(trace));
  };
  const std::vector<std::pair<std::string, std::vector<Span>>> cases{
      {"queue decides, 90 % of the pulls' time: the decode rank's progress thread",
       {request(Stage::queue, 0, 0, 90), piece(Stage::wire, 0, 0, 90, 100)}},
      {"connect decides, 90 % of the pulls' time: sessions are made on the way",
       {request(Stage::connect, 0, 0, 90), piece(Stage::wire, 0, 0, 90, 100)}},
      {"wait decides, 90 % of the pulls' time: prefill rank 1 is late (first piece 90.0 us after "
       "PULL, "
       "the others' within 10.0 us)",
       {request(Stage::wait, 0, 0, 10), piece(Stage::wire, 0, 0, 10, 20),
        request(Stage::wait, 1, 0, 90), piece(Stage::wire, 1, 0, 90, 100)}},
      {"wait decides, 90 % of the pulls' time: prefill has nothing to send yet",
       {request(Stage::wait, 0, 0, 89), piece(Stage::wire, 0, 0, 89, 99),
        request(Stage::wait, 1, 0, 90), piece(Stage::wire, 1, 0, 90, 100)}},
      {"landing decides, 90 % of the pulls' time: pieces wait for landing slots",
       {piece(Stage::wire, 0, 0, 90, 100, 90)}},
      {"wire decides, 100 % of the pulls' time: 20.00 GB/s with 2.0 pieces on it at once",
       {piece(Stage::wire, 0, 0, 0, 100), piece(Stage::wire, 0, 1, 0, 100)}},
      {"wire decides, 90 % of the pulls' time: 22.22 GB/s with 1.1 pieces on it at once; prefill "
       "rank 1 "
       "sends 11.11 GB/s, rank 0 sends 100.00",
       {piece(Stage::wire, 0, 0, 10, 20), piece(Stage::wire, 1, 0, 10, 100)}},
      {"wire decides, 50 % of the pulls' time: 40.00 GB/s with 1.0 pieces on it at once; wire and "
       "copies take turns (overlap 0.00): a larger window, or smaller slots",
       {piece(Stage::wire, 0, 0, 0, 25), piece(Stage::scatter, 0, 0, 25, 50),
        piece(Stage::wire, 0, 1, 50, 75), piece(Stage::scatter, 0, 1, 75, 100)}},
      {"scatter decides, 90 % of the pulls' time: copies into pages: larger pages or a less "
       "scattered "
       "pool; wire and copies take turns (overlap 0.00): more landing_slots",
       {piece(Stage::wire, 0, 0, 0, 5), piece(Stage::scatter, 0, 0, 5, 50),
        piece(Stage::wire, 0, 1, 50, 55, 40), piece(Stage::scatter, 0, 1, 55, 100)}},
      {"commit decides, 90 % of the pulls' time: prefill ranks answer COMMIT late",
       {piece(Stage::wire, 0, 0, 0, 10), request(Stage::commit, 0, 10, 100)}},
      {"room decides, 90 % of the pulls' time: rooms are opened after",
       {request(Stage::room, 0, 0, 90), piece(Stage::wire, 0, 0, 90, 100)}},
      {"slot decides, 90 % of the pulls' time: pieces wait for staging slots",
       {piece(Stage::gather, 0, 0, 90, 95, 90), piece(Stage::wire, 0, 0, 95, 100)}},
      {"gather decides, 90 % of the pulls' time: copies out of pages",
       {piece(Stage::gather, 0, 0, 0, 90), piece(Stage::wire, 0, 0, 90, 100)}},
      {"exposed decides, 90 % of the pulls' time: pieces are ready, and fetched late",
       {piece(Stage::exposed, 0, 0, 0, 100), piece(Stage::wire, 0, 0, 90, 100)}},
  };
  for (const auto& [begin, spans] : cases)
    EXPECT_EQ(verdict_on(spans).substr(0, begin.size()), begin);
  EXPECT_EQ(verdict(summarize(three_processes())),
            "no pull here: give the decode ranks' files, too");
}

TEST(TraceSummaryTest, TextAndJsonSayTheSame) {
  const Summary summary = summarize(one_pull());
  const std::string text = to_text(summary);
  for (const char* const part :
       {"3 processes, 1 rooms, 1 pulls within 100.0 us, 2.0 MB",
        "wire            2     10.0 us     22.0 us     22.0 us     32.0 us      22.0 %",
        "decode 0          1 lanes:  wire 32 %  scatter 25 %  free 43 %",
        "room 7, pull 1 of decode 0: 100.0 us, 2.0 MB, prefill rank 1 last: wire 22 % scatter 20 %",
        "verdict  wire decides, 22 % of the pulls' time"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  const Json json = to_json(summary);
  EXPECT_EQ(json["bytes"], 2'000'000);
  EXPECT_EQ(json["stages"]["wire"]["p99_ns"], 22'000);
  EXPECT_FALSE(json["stages"].contains("exposes"));
  EXPECT_NEAR(json["share_of_pulls"]["wire"].get<double>(), 0.22, 1e-9);
  EXPECT_EQ(json["sources"][1]["slowest"], 1);
  EXPECT_EQ(json["ranks"][2]["lanes"][0]["name"], "decode landing 0");
  EXPECT_EQ(json["slowest"][0]["room"], "7");
  EXPECT_EQ(json["slowest"][0]["slowest_source"], 1);
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

TEST(TracePictureTest, DrawsEverySpanOfTheRoomInItsLane) {
  Trace trace = one_pull();
  Span other = piece(Stage::exposed, 0, 1, 50, 80);
  other.room = 8;
  trace.spans.push_back(other);
  trace.processes[0].name = "a<b & prefill 0";
  const auto svg = pipeline_svg(trace, 7);
  ASSERT_TRUE(svg.ok());
  EXPECT_TRUE(svg->starts_with("<svg ") && svg->ends_with("</svg>\n"));
  EXPECT_EQ(count(*svg, "<title>"), trace.spans.size());
  EXPECT_EQ(count(*svg, "class=\"wire\" x"), 3U);  // one is the legend's
  EXPECT_EQ(count(*svg, "room 8"), 1U);
  EXPECT_NE(svg->find("wire: 22.0 us, piece 0 from prefill 1, 1.0 MB, waited 6.0 us"),
            std::string::npos);
  EXPECT_NE(svg->find("Room 7: 2.0 MB from 2 prefill ranks in 100.0 us"), std::string::npos);
  EXPECT_NE(svg->find(">a&lt;b &amp; prefill 0<"), std::string::npos);
  for (const char* const label :
       {">pull 1<", ">lease of pull 1<", ">from prefill 1<", ">slot 0<", ">landing 0<", ">100 us<"})
    EXPECT_NE(svg->find(label), std::string::npos) << label;
}

TEST(TracePictureTest, DrawsAWindowOnly) {
  const auto svg = pipeline_svg(one_pull(), 7, {.from_ns = 92 * kUs, .to_ns = 98 * kUs});
  ASSERT_TRUE(svg.ok());
  EXPECT_EQ(count(*svg, "<title>"), 4U);  // pull, lease, exposed, commit
  const auto outside = pipeline_svg(one_pull(), 7, {.from_ns = 100 * kUs});
  ASSERT_FALSE(outside.ok());
  EXPECT_EQ(outside.error().message,
            "room 7 took 100.0 us, and has no part from 100.0 us to 100.0 us");
  EXPECT_EQ(pipeline_svg(one_pull(), 9).error().message, "there is nothing of room 9");
}

TEST(TracePictureTest, StaysSmallWhereNothingCanBeToldApart) {
  Trace trace = one_pull();
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    Span span = piece(Stage::wire, 0, 0, 0, 0);
    span.begin_ns = static_cast<std::int64_t>(i);
    span.end_ns = span.begin_ns + 1;
    trace.spans.push_back(span);
  }
  EXPECT_LT(pipeline_svg(trace, 7)->size(), 600'000U);
}

TEST(TraceFileTest, IsReadAsItWasWritten) {
  const Trace trace = one_pull();
  const auto read = parse_trace(write_trace(trace));
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(write_trace(*read), write_trace(trace));
  EXPECT_EQ(to_json(summarize(*read)), to_json(summarize(trace)));
  EXPECT_EQ(read->boot_id, "boot");
  ASSERT_EQ(read->spans.size(), trace.spans.size());
  EXPECT_EQ(read->spans[10].begin_ns, 48 * kUs);
  EXPECT_EQ(read->spans[10].waited_ns, 6 * kUs);
  EXPECT_EQ(full_name(*read, read->spans[10].rank), "decode 0");
}

// Events 0 to 2 of this are those of a process, 3 of a piece, 4 and 5 of a request.
Json small_file() {
  return Json::parse(
      R"({"displayTimeUnit":"ns","otherData":{"version":1,"boot_id":"b","overwritten":0},
"traceEvents":[
{"ph":"M","name":"process_name","pid":4711,"tid":0,"args":{"name":"decode 0"}},
{"ph":"M","name":"thread_name","pid":4711,"tid":1001,"args":{"name":"decode landing 0"}},
{"ph":"M","name":"process_sort_index","pid":4711,"tid":0,"args":{"sort_index":1}},
{"ph":"X","cat":"piece","name":"wire","pid":4711,"tid":1001,"ts":123456.789,"dur":210.001,
 "args":{"rank":"decode","room":"17","pull":"3","source":2,"lease":"9","piece":0,"bytes":4194304,"waited_us":1.5}},
{"ph":"b","cat":"request","name":"pull","pid":4711,"tid":1000,"ts":123400.1,"id2":{"local":"0x1"},
 "args":{"rank":"decode","room":"18446744073709551615","pull":"3","source":0,"lease":"0"}},
{"ph":"e","cat":"request","name":"pull","pid":4711,"tid":1000,"ts":124400.1,"id2":{"local":"0x1"}}]})");
}

TEST(TraceFileTest, HasTimesToTheNanosecond) {
  const auto trace = parse_trace(small_file().dump());
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  ASSERT_EQ(trace->spans.size(), 2U);
  EXPECT_EQ(trace->spans[0].begin_ns, 123'456'789);
  EXPECT_EQ(trace->spans[0].ns(), 210'001);
  EXPECT_EQ(trace->spans[0].waited_ns, 1'500);
  EXPECT_EQ(trace->spans[1].ns(), 1'000'000);
  EXPECT_EQ(trace->spans[1].room, UINT64_MAX);
  EXPECT_EQ(trace->lanes[trace->spans[0].lane].name, "decode landing 0");
}

TEST(TraceFileTest, ABadOneIsRefusedByEventAndField) {
  const auto spoil = [](const std::function<void(Json&)>& how) {
    Json file = small_file();
    how(file);
    const auto trace = parse_trace(file.dump());
    return trace ? std::string{"accepted"} : trace.error().message;
  };
  const auto at = [&](const char* pointer, const Json& value) {
    return spoil([&](Json& file) { file[Json::json_pointer{pointer}] = value; });
  };
  const std::vector<std::pair<std::string, std::string>> refused{
      {at("/otherData", 1), "otherData: not an object"},
      {at("/otherData/version", 2), "otherData.version: 2, this program reads 1"},
      {at("/otherData/boot_id", 5), "otherData.boot_id: not a string"},
      {at("/otherData/overwritten", -1), "otherData.overwritten: not a whole number from 0 up"},
      {at("/traceEvents", Json::object()), "traceEvents: not an array of objects"},
      {spoil([](Json& file) { file.erase("traceEvents"); }),
       "traceEvents: not an array of objects"},
      {at("/traceEvents/3", 7), "traceEvents: not an array of objects"},
      {at("/traceEvents/1/pid", "x"), "event 1: pid: not a whole number from 0 up"},
      {at("/traceEvents/1/tid", 1.5), "event 1: tid: not a whole number from 0 up"},
      {at("/traceEvents/1/args/name", 1), "event 1: args.name: not a string"},
      {at("/traceEvents/3/ph", "Z"), "event 3: ph: Z is not M, X, or b and e"},
      {at("/traceEvents/3/ph", "b"), "event 3: ph: a wire is not an b"},
      {at("/traceEvents/3/name", "landing"),
       "event 3: name: landing is not a stage that has spans"},
      {at("/traceEvents/3/ts", -1), "event 3: ts: -1 us is not within 0 and 1e+15"},
      {at("/traceEvents/3/ts", "1"), "event 3: ts: not a number"},
      {at("/traceEvents/3/dur", 2e15), "event 3: dur: 2e+15 us is not within 0 and 1e+15"},
      {at("/traceEvents/3/args", Json::array()), "event 3: args: not an object"},
      {at("/traceEvents/3/args/rank", 0), "event 3: args.rank: not a string"},
      {at("/traceEvents/3/args/room", 17), "event 3: args.room: not a string"},
      {at("/traceEvents/3/args/lease", 9), "event 3: args.lease: not a string"},
      {at("/traceEvents/3/args/pull", "3x"),
       "event 3: args.pull: not a decimal number of at most 64 bits"},
      {at("/traceEvents/3/args/pull", "18446744073709551616"),
       "event 3: args.pull: not a decimal number of at most 64 bits"},
      {at("/traceEvents/3/args/source", 1ULL << 32),
       "event 3: args.source: 4294967296 is above 4294967295"},
      {at("/traceEvents/3/args/bytes", 1ULL << 41),
       "event 3: args.bytes: 2199023255552 is above 1099511627776"},
      {at("/traceEvents/3/args/piece", Json{}),
       "event 3: args.piece: not a whole number from 0 up"},
      {at("/traceEvents/3/args/waited_us", Json{}), "event 3: args.waited_us: not a number"},
      {at("/traceEvents/4/id2", Json{}), "event 4: id2: not an object"},
      {at("/traceEvents/5/ph", "X"),
       "event 5: ph: X pull follows the b of a pull, whose e was to come"},
      {at("/traceEvents/5/name", "lease"),
       "event 5: ph: e lease follows the b of a pull, whose e was to come"},
      {at("/traceEvents/5/id2/local", "0x2"), "event 5: id2.local: not that of its b: 0x1"},
      {at("/traceEvents/5/ts", 1), "event 5: ts: before that of its b"},
      {spoil([](Json& file) { file["traceEvents"].erase(5); }), "traceEvents: the last b has no e"},
      {spoil([](Json& file) { file = Json::array(); }), "not a JSON object: wrong behind 0 events"},
  };
  for (const auto& [message, expected] : refused) EXPECT_EQ(message, expected);
  const std::string text = small_file().dump();
  EXPECT_EQ(parse_trace(text.substr(0, text.size() - 3)).error().message.substr(0, 24),
            "not a JSON object: wrong");
}

using test::Outcome;

Outcome run_tool(const std::string& options) {
  return test::run_command(std::string{KVSHARD_TRACE_TOOL} + " " + options + " 2>&1");
}

class TraceToolTest : public ::testing::Test {
 protected:
  TraceToolTest() {
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path{::testing::TempDir()} /
              (std::string{"kvshard_trace_"} + test->name());
    std::filesystem::create_directories(folder_);
  }
  ~TraceToolTest() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return folder_ / name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream{path(name)} << text;
    return path(name);
  }
  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream file{path(name), std::ios::binary};
    return {std::istreambuf_iterator<char>{file}, {}};
  }
  // What one of the processes would have written, whose number may be that of another one.
  [[nodiscard]] std::string write_process(std::size_t process, std::uint64_t pid) const {
    const Trace all = one_pull();
    Trace part{.boot_id = all.boot_id,
               .processes = {{pid, all.processes[process].name}},
               .ranks = {{0, all.ranks[process].name}},
               .lanes = {},
               .spans = {}};
    for (std::size_t lane = 0; lane < 3; ++lane)
      part.lanes.push_back({0, lane + 1, all.lanes[3 * process + lane].name});
    for (Span span : all.spans) {
      if (span.rank != process) continue;
      span.rank = 0;
      span.lane -= 3 * process;
      part.spans.push_back(span);
    }
    return write("process" + std::to_string(process), write_trace(part));
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(TraceToolTest, LaysProcessesSideBySide) {
  // Three containers, in each of which the rank is process 1.
  const std::string files =
      write_process(0, 1) + " " + write_process(1, 1) + " " + write_process(2, 1);
  const Outcome text = run_tool(files + " --svg " + path("picture") + " --merge " + path("merged"));
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_EQ(text.output, to_text(summarize(one_pull())));
  EXPECT_EQ(read("picture"), *pipeline_svg(one_pull(), 7));
  const auto merged = parse_trace(read("merged"));
  ASSERT_TRUE(merged.ok()) << merged.error().message;
  EXPECT_EQ(merged->processes[0].pid, 1U);
  EXPECT_EQ(merged->processes[1].pid, 2U);
  EXPECT_EQ(merged->processes[2].pid, 3U);
  const Outcome json = run_tool(path("merged") + " --json");
  EXPECT_EQ(Json::parse(json.output, nullptr, false), to_json(summarize(one_pull())));
}

TEST_F(TraceToolTest, TakesARoomAndAWindow) {
  const std::string file = write("all", write_trace(one_pull()));
  EXPECT_EQ(run_tool(file + " --room 7 --from 0.092 --to 0.098 --svg " + path("picture")).exit_code,
            0);
  EXPECT_EQ(read("picture"),
            *pipeline_svg(one_pull(), 7, {.from_ns = 92 * kUs, .to_ns = 98 * kUs}));
  const Outcome none = run_tool(file + " --room 9");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_EQ(none.output, "kvshard-trace: there is nothing of room 9\n");
}

TEST_F(TraceToolTest, RefusesWhatItCannotUse) {
  const std::string good = write("good", write_trace(one_pull()));
  Trace elsewhere = one_pull();
  elsewhere.boot_id = "another";
  const std::string other = write("other", write_trace(elsewhere));
  Json file = small_file();
  file["traceEvents"][3].erase("ts");
  const std::string bad = write("bad", file.dump());
  const std::string prefill = write_process(0, 1);
  const std::vector<std::pair<std::string, std::string>> refused{
      {good + " " + bad, bad + ": event 3: ts: not a number"},
      {good + " " + path("none"), path("none") + " cannot be read"},
      {path(""), path("") + " cannot be read"},
      {good + " " + other, good + " was written on boot boot, " + other +
                               " on boot another: their clocks have nothing in common"},
      {prefill + " --svg " + path("picture"), "no pull here to draw: name a room"},
      {good + " --merge " + path("none/merged"), path("none/merged") + " cannot be written"},
  };
  for (const auto& [options, message] : refused) {
    const Outcome outcome = run_tool(options);
    EXPECT_EQ(outcome.exit_code, 1) << options;
    EXPECT_EQ(outcome.output, "kvshard-trace: " + message + "\n");
  }
  EXPECT_NE(run_tool("").exit_code, 0);
}

TEST_F(TraceToolTest, MergesForToolsThatStartProcesses) {
  const std::vector<std::string> files{write_process(0, 1), write_process(2, 2)};
  ASSERT_TRUE(merge_files(files, path("merged")).ok());
  EXPECT_FALSE(std::filesystem::exists(files[0]));
  EXPECT_EQ(parse_trace(read("merged"))->processes.size(), 2U);
  EXPECT_FALSE(merge_files(files, path("again")).ok());  // they are gone
}

}  // namespace
}  // namespace kvshard::trace
