# The installed package: find_package(kvshard) gives kvshard::kvshard, pkg-config knows kvshard.
# Components: runtime (a shared library), dev (all that building against it needs), tools. The exporter has
# its own: prometheus and prometheus_dev; find_package(kvshard COMPONENTS prometheus) gives it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvshard_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvshard)
get_target_property(kvshard_type kvshard TYPE)
# A static library cannot carry what it was linked with; the package config and pkg-config then find it.
set(KVSHARD_IS_STATIC OFF)
set(KVSHARD_LEAKS_OPENSSL OFF)
set(KVSHARD_LEAKS_UCX OFF)
set(KVSHARD_LEAKS_CUDA OFF)
set(KVSHARD_PC_REQUIRES "")
set(KVSHARD_PC_LIBS "")
if(kvshard_type STREQUAL "STATIC_LIBRARY")
  set(KVSHARD_IS_STATIC ON)
  set(KVSHARD_LEAKS_OPENSSL ON)
  set(KVSHARD_PC_REQUIRES "libcrypto >= 3.0")
  set(KVSHARD_PC_LIBS "-lstdc++ -lm -pthread")
  if(TARGET ucx::ucp)
    set(KVSHARD_LEAKS_UCX ON)
    string(APPEND KVSHARD_PC_REQUIRES ", ucx, ucx-ucs")
  endif()
  if(KVSHARD_ENABLE_CUDA)
    set(KVSHARD_LEAKS_CUDA ON)
    string(PREPEND KVSHARD_PC_LIBS "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
  endif()
endif()

install(TARGETS kvshard EXPORT kvshard-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
install(EXPORT kvshard-targets NAMESPACE kvshard:: DESTINATION ${kvshard_cmake_dir} COMPONENT dev)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvshardConfig.cmake.in
  ${PROJECT_BINARY_DIR}/kvshardConfig.cmake INSTALL_DESTINATION ${kvshard_cmake_dir})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvshardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvshardConfig.cmake ${PROJECT_BINARY_DIR}/kvshardConfigVersion.cmake
  DESTINATION ${kvshard_cmake_dir} COMPONENT dev)

# The prefix is told from where the file lies, so that an install tree can be moved.
set(kvshard_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH KVSHARD_PC_PREFIX /prefix/${kvshard_pc_dir} /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/kvshard.pc.in ${PROJECT_BINARY_DIR}/kvshard.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvshard.pc DESTINATION ${kvshard_pc_dir} COMPONENT dev)

if(KVSHARD_ENABLE_PROMETHEUS)
  install(TARGETS kvshard_prometheus EXPORT kvshard-prometheus-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT prometheus NAMELINK_COMPONENT prometheus_dev
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT prometheus_dev
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT prometheus_dev)
  install(EXPORT kvshard-prometheus-targets NAMESPACE kvshard:: DESTINATION ${kvshard_cmake_dir}
    COMPONENT prometheus_dev)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/kvshard-prometheus.pc.in
    ${PROJECT_BINARY_DIR}/kvshard-prometheus.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/kvshard-prometheus.pc DESTINATION ${kvshard_pc_dir}
    COMPONENT prometheus_dev)
endif()

# All that is installed, and nothing else.
add_custom_target(kvshard-all)
add_dependencies(kvshard-all kvshard)
if(KVSHARD_ENABLE_PROMETHEUS)
  add_dependencies(kvshard-all kvshard_prometheus)
endif()
foreach(tool IN ITEMS kvshard-registry kvshard-bench kvshard-doctor kvshard-trace)
  if(TARGET ${tool})
    install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
    add_dependencies(kvshard-all ${tool})
  endif()
endforeach()
