# The public headers: one FILE_SET, installed from this list and compiled alone by
# VERIFY_INTERFACE_HEADER_SETS.
file(GLOB KVSHARD_PUBLIC_HEADERS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/kvshard/*.h
  ${PROJECT_SOURCE_DIR}/include/kvshard/*.hpp)
list(FILTER KVSHARD_PUBLIC_HEADERS EXCLUDE REGEX "/prometheus\\.hpp$")  # of a library of its own
target_sources(kvshard PUBLIC FILE_SET HEADERS
  BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${KVSHARD_PUBLIC_HEADERS})
set_target_properties(kvshard PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON
  VERSION ${PROJECT_VERSION} SOVERSION 0)
# kvshard_export_api(<target>): of a shared library, what cmake/kvshard.map says.
function(kvshard_export_api target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    set(script ${PROJECT_SOURCE_DIR}/cmake/kvshard.map)
    target_link_options(${target} PRIVATE -Wl,--version-script=${script})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${script})
  endif()
endfunction()
kvshard_export_api(kvshard)
