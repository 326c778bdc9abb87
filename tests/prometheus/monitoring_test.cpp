// The dashboard, the alerts and the documentation speak of metrics that there are.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "prometheus/samples.hpp"

namespace kvshard::test {
namespace {

std::string read(const std::string& page) {
  std::ifstream file{KVSHARD_DOCS_DIR "/" + page};
  EXPECT_TRUE(file.good()) << page;
  return {std::istreambuf_iterator<char>{file}, {}};
}

std::vector<prometheus::MetricFamily> everything() {
  Families families{{}};
  append(families, prefill_metrics());
  append(families, decode_metrics(), "d");
  return families.take();
}

// By which samples are asked for: a histogram has three names.
std::set<std::string> sample_names() {
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family : everything()) {
    const bool histogram = family.type == prometheus::MetricType::Histogram;
    const bool counted = histogram || family.type == prometheus::MetricType::Summary;
    if (!counted) names.insert(family.name);
    if (histogram) names.insert(family.name + "_bucket");
    if (counted) names.insert({family.name + "_sum", family.name + "_count"});
  }
  return names;
}

std::set<std::string> named_in(const std::string& text) {
  std::set<std::string> names;
  for (const std::string prefix : {"kvshard_decode_", "kvshard_prefill_"}) {
    for (std::size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at)) {
      const std::size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", at);
      if (end != at + prefix.size()) names.insert(text.substr(at, end - at));
      at += prefix.size();
    }
  }
  return names;
}

TEST(MonitoringTest, TheDashboardAsksForWhatThereIs) {
  const auto dashboard = nlohmann::json::parse(read("monitoring/dashboard.json"));
  EXPECT_GE(dashboard.at("schemaVersion").get<int>(), 36);
  EXPECT_EQ(dashboard.at("templating").at("list").at(0).at("type"), "datasource");
  const std::set<std::string> known = sample_names();
  std::set<int> ids;
  for (const auto& panel : dashboard.at("panels")) {
    const auto title = panel.at("title").get<std::string>();
    EXPECT_TRUE(ids.insert(panel.at("id").get<int>()).second) << title;
    EXPECT_EQ(panel.at("datasource").at("uid"), "${datasource}") << title;
    for (const auto& target : panel.at("targets")) {
      const std::set<std::string> asked = named_in(target.at("expr").get<std::string>());
      EXPECT_FALSE(asked.empty()) << title;
      for (const std::string& name : asked)
        EXPECT_EQ(known.count(name), 1U) << title << ": " << name;
    }
  }
  EXPECT_GE(ids.size(), 10U);
  for (const auto& variable : dashboard.at("templating").at("list"))
    for (const std::string& name : named_in(variable.at("query").dump()))
      EXPECT_EQ(known.count(name), 1U) << name;
}

TEST(MonitoringTest, AlertsWatchWhatThereIs) {
  std::set<std::string> known = sample_names();
  for (const auto& family : everything()) known.insert(family.name);  // in what they tell people
  const std::set<std::string> watched = named_in(read("monitoring/alerts.yml"));
  EXPECT_GE(watched.size(), 9U);
  for (const std::string& name : watched) EXPECT_EQ(known.count(name), 1U) << name;
}

TEST(MonitoringTest, TheDocumentationListsEveryMetric) {
  const std::string page = read("metrics.md");
  std::set<std::string> known = sample_names();
  for (const auto& family : everything()) {
    known.insert(family.name);
    EXPECT_NE(page.find("| `" + family.name + '`'), std::string::npos) << family.name;
  }
  for (const std::string& name : named_in(page)) EXPECT_EQ(known.count(name), 1U) << name;
}

}  // namespace
}  // namespace kvshard::test
