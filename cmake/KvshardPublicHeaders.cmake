# The public headers: one FILE_SET, installed from this list and compiled alone by
# VERIFY_INTERFACE_HEADER_SETS.
file(GLOB KVSHARD_PUBLIC_HEADERS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/kvshard/*.h
  ${PROJECT_SOURCE_DIR}/include/kvshard/*.hpp)
target_sources(kvshard PUBLIC FILE_SET HEADERS
  BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${KVSHARD_PUBLIC_HEADERS})
set_target_properties(kvshard PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON
  VERSION ${PROJECT_VERSION} SOVERSION 0)
set(KVSHARD_VERSION_SCRIPT ${PROJECT_SOURCE_DIR}/cmake/kvshard.map)
get_target_property(kvshard_type kvshard TYPE)
if(kvshard_type STREQUAL "SHARED_LIBRARY")
  target_link_options(kvshard PRIVATE -Wl,--version-script=${KVSHARD_VERSION_SCRIPT})
  set_property(TARGET kvshard APPEND PROPERTY LINK_DEPENDS ${KVSHARD_VERSION_SCRIPT})
endif()
