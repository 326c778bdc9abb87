# The installed package: find_package(kvshard) gives kvshard::kvshard.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvshard_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvshard)
get_target_property(kvshard_type kvshard TYPE)
# A static library cannot carry what it was linked with; the package config then finds it.
set(KVSHARD_LEAKS_OPENSSL OFF)
set(KVSHARD_LEAKS_UCX OFF)
set(KVSHARD_LEAKS_CUDA OFF)
if(kvshard_type STREQUAL "STATIC_LIBRARY")
  set(KVSHARD_LEAKS_OPENSSL ON)
  if(TARGET ucx::ucp)
    set(KVSHARD_LEAKS_UCX ON)
  endif()
  set(KVSHARD_LEAKS_CUDA ${KVSHARD_ENABLE_CUDA})
endif()

install(TARGETS kvshard EXPORT kvshard-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvshard-targets NAMESPACE kvshard:: DESTINATION ${kvshard_cmake_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvshardConfig.cmake.in
  ${PROJECT_BINARY_DIR}/kvshardConfig.cmake INSTALL_DESTINATION ${kvshard_cmake_dir})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvshardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvshardConfig.cmake ${PROJECT_BINARY_DIR}/kvshardConfigVersion.cmake
  DESTINATION ${kvshard_cmake_dir})
if(TARGET kvshard-registry)
  install(TARGETS kvshard-registry RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
