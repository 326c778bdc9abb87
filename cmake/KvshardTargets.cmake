# What every target of ours shares. Nothing here reaches a consumer: all of it is PRIVATE.
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(OpenSSL 3.0 REQUIRED COMPONENTS Crypto)
if(KVSHARD_ENABLE_PROMETHEUS)
  find_package(prometheus-cpp REQUIRED)
endif()

# kvshard_options(<target>): language level, warnings, visibility, sanitizers.
function(kvshard_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wthread-safety>
    # GCC 12 sees overlaps that cannot be in "literal" + std::string (its bug 105651).
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>)
  if(KVSHARD_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  if(KVSHARD_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${KVSHARD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
    target_link_options(${target} PRIVATE -fsanitize=${KVSHARD_SANITIZE})
  endif()
endfunction()

# kvshard_test(<name> LABELS <label>... SOURCES <file>... [LIBRARIES <target>...])
# One gtest binary; every test case in it is a ctest of its own, so that they run in parallel.
function(kvshard_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;SOURCES;LIBRARIES" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  kvshard_options(${name})
  target_link_libraries(${name} PRIVATE kvshard_core kvshard_test_support GTest::gtest_main ${ARG_LIBRARIES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  # UCX 1.13 has no peer-error mode on shared memory, and its memory hooks crash under tsan. An emulator
  # prefix carries the environment, since gtest_discover_tests() takes no properties that are lists.
  set_target_properties(${name} PROPERTIES CROSSCOMPILING_EMULATOR
    "env;UCX_TLS=tcp;UCX_MEM_EVENTS=n;KVSHARD_SHARED_DIR=${PROJECT_SOURCE_DIR}/../shared")
  string(REPLACE ";" "-" label "${ARG_LABELS}")  # "unit-ucx": ctest -L takes a pattern, and finds both
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${label}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
