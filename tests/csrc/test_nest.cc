#include "arrays.h"
#include "nest.h"

namespace torchbeast {

TEST_CASE("map keeps the structure and the order of the leaves") {
  const auto nest =
      make_nest<int>(dict({"b", "a"}, {leaf(), tuple({leaf(), leaf()})}), {1, 2, 3});
  const Nest<std::string> result =
      nest.map([](int x) { return std::to_string(10 * x); });
  CHECK(*result.structure == *nest.structure);
  CHECK(result.leaves == std::vector<std::string>{"10", "20", "30"});
}

TEST_CASE("leaves are named by their path") {
  const Structure s =
      dict({"obs", "r"}, {tuple({leaf(), dict({"x"}, {leaf()})}), leaf()});
  CHECK(s.num_leaves() == 3);
  CHECK(s.leaf_name(0) == "leaf 'obs/0'");
  CHECK(s.leaf_name(1) == "leaf 'obs/1/x'");
  CHECK(s.leaf_name(2) == "leaf 'r'");
  CHECK(leaf().leaf_name(0) == "the array");
}

TEST_CASE("front is the first leaf, also behind empty nests") {
  CHECK(make_nest<int>(tuple({tuple({}), leaf()}), {7}).front() == 7);
  CHECK(contains(message<std::invalid_argument>(
                     [] { (void)make_nest<int>(tuple({}), {}).front(); }),
                 "no leaves"));
}

TEST_CASE("zip joins leaves by key, not by the order of the keys") {
  const auto a =
      make_nest<int>(dict({"x", "y"}, {tuple({leaf(), leaf()}), leaf()}), {1, 2, 3});
  const auto b =
      make_nest<int>(dict({"y", "x"}, {leaf(), tuple({leaf(), leaf()})}), {30, 10, 20});
  const auto zipped = zip<int>({a, b});
  CHECK(*zipped.structure == *a.structure);
  CHECK(zipped.leaves == std::vector<std::vector<int>>{{1, 10}, {2, 20}, {3, 30}});
}

TEST_CASE("tuples match lists") {
  const Structure list{Kind::kList, {}, {leaf(), leaf()}};
  CHECK(match(tuple({leaf(), leaf()}), list) == std::vector<size_t>{0, 1});
}

TEST_CASE("structures that differ are refused with the place where they do") {
  const auto why = [](const Structure& a, const Structure& b) {
    return message<std::invalid_argument>([&] { (void)match(a, b); });
  };
  CHECK(contains(why(leaf(), tuple({})), "expected a leaf, got a tuple of 0"));
  CHECK(contains(
      why(dict({"a"}, {tuple({leaf()})}), dict({"a"}, {tuple({leaf(), leaf()})})),
      "at 'a': expected a tuple of 1, got a tuple of 2"));
  CHECK(contains(
      why(dict({"a", "b"}, {leaf(), leaf()}), dict({"a", "c"}, {leaf(), leaf()})),
      "keys {'a', 'b'}, got a dict with the keys {'a', 'c'}"));
  CHECK(
      contains(why(tuple({leaf(), leaf()}), tuple({leaf(), dict({}, {})})), "at '1'"));
}

}  // namespace torchbeast
