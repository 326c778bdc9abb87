// A library that exports what it must not.
namespace kvshard {
class PageLayout {
 public:
  static void create();
};
void PageLayout::create() {}
namespace log {
void planted() {}
}  // namespace log
}  // namespace kvshard
namespace fmt {
void planted() {}
}  // namespace fmt
