# SPDX-License-Identifier: Apache-2.0
# What the library needs from outside. Only oneDNN may be missing: it is then downloaded once (scripts/setup.sh onednn).

function(halfstep_missing package debian)
  message(FATAL_ERROR "${package} was not found. On Debian: apt-get install ${debian}\n"
                      "Or run scripts/setup.sh, which installs everything that is missing.")
endfunction()

macro(halfstep_require package debian)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    halfstep_missing("${package}" "${debian}")
  endif()
endmacro()

set(THREADS_PREFER_PTHREAD_FLAG ON)
halfstep_require(Threads libc6-dev)
halfstep_require(ZLIB zlib1g-dev)
halfstep_require(fmt libfmt-dev)
halfstep_require(hwy libhwy-dev)
halfstep_require(nlohmann_json nlohmann-json3-dev)
halfstep_require(JPEG libjpeg62-turbo-dev)
halfstep_require(PNG libpng-dev)
halfstep_require(LibArchive libarchive-dev)
halfstep_require(pugixml libpugixml-dev)
halfstep_require(yaml-cpp libyaml-cpp-dev)
# Its target got a namespace in 0.8.
set(halfstep_yaml $<IF:$<TARGET_EXISTS:yaml-cpp::yaml-cpp>,yaml-cpp::yaml-cpp,yaml-cpp>)
# Neither CMake nor cairo has a file that find_package() finds.
find_path(HALFSTEP_CAIRO_INCLUDE cairo/cairo.h)
find_library(HALFSTEP_CAIRO_LIBRARY cairo)
mark_as_advanced(HALFSTEP_CAIRO_INCLUDE HALFSTEP_CAIRO_LIBRARY)
if(NOT HALFSTEP_CAIRO_INCLUDE OR NOT HALFSTEP_CAIRO_LIBRARY)
  halfstep_missing(cairo libcairo2-dev)
endif()
if(NOT TARGET halfstep_cairo)
  add_library(halfstep_cairo UNKNOWN IMPORTED)
  set_target_properties(halfstep_cairo PROPERTIES IMPORTED_LOCATION "${HALFSTEP_CAIRO_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${HALFSTEP_CAIRO_INCLUDE}")
endif()
# Headers only, and no file that find_package() finds either.
find_path(HALFSTEP_ASIO_INCLUDE asio/io_context.hpp)
mark_as_advanced(HALFSTEP_ASIO_INCLUDE)
if(NOT HALFSTEP_ASIO_INCLUDE)
  halfstep_missing(asio libasio-dev)
endif()
if(NOT TARGET halfstep_asio)
  add_library(halfstep_asio INTERFACE IMPORTED)
  # Whether it finds aligned_alloc depends on what was included before it: files would disagree about who frees.
  set_target_properties(halfstep_asio PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${HALFSTEP_ASIO_INCLUDE}"
    INTERFACE_COMPILE_DEFINITIONS "ASIO_STANDALONE;ASIO_NO_DEPRECATED;ASIO_DISABLE_STD_ALIGNED_ALLOC")
  if(HALFSTEP_SANITIZE STREQUAL "thread")
    # It doesn't know fences. One thread runs each io_context, and what others hand to it is under a mutex.
    set_property(TARGET halfstep_asio APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()
halfstep_require(Protobuf "libprotobuf-dev protobuf-compiler")
# Downloads (data::fetch); without them the library is built all the same, and says so where they are asked for.
find_package(CURL QUIET)
find_package(OpenSSL QUIET)

# oneDNN: a given prefix, the shared download folder, the system's, or a download into the build folder.
if(HALFSTEP_ONEDNN_ROOT)
  find_package(dnnl 3.2 CONFIG QUIET PATHS "${HALFSTEP_ONEDNN_ROOT}" NO_DEFAULT_PATH)
  if(NOT dnnl_FOUND)
    message(FATAL_ERROR "HALFSTEP_ONEDNN_ROOT: no oneDNN 3.2 or newer in '${HALFSTEP_ONEDNN_ROOT}'")
  endif()
else()
  if(DEFINED ENV{HALFSTEP_DEPS})
    set(halfstep_onednn_prefix "$ENV{HALFSTEP_DEPS}/onednn")
  else()
    set(halfstep_onednn_prefix "${PROJECT_BINARY_DIR}/_deps/onednn")
  endif()
  find_package(dnnl 3.2 CONFIG QUIET HINTS "${halfstep_onednn_prefix}")
  if(NOT dnnl_FOUND)
    message(STATUS "oneDNN 3.2 or newer was not found; downloading it into ${halfstep_onednn_prefix}")
    execute_process(COMMAND "${PROJECT_SOURCE_DIR}/scripts/setup.sh" onednn "${halfstep_onednn_prefix}"
                    RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "oneDNN could not be downloaded (see above). Give an installed one by "
                          "-DHALFSTEP_ONEDNN_ROOT=PREFIX, or run: scripts/setup.sh onednn ${halfstep_onednn_prefix}")
    endif()
    find_package(dnnl 3.2 CONFIG REQUIRED PATHS "${halfstep_onednn_prefix}" NO_DEFAULT_PATH)
  endif()
endif()
message(STATUS "oneDNN ${dnnl_VERSION}: ${dnnl_DIR}")

set(HALFSTEP_PRIVATE_LIBRARIES DNNL::dnnl hwy::hwy fmt::fmt nlohmann_json::nlohmann_json ZLIB::ZLIB JPEG::JPEG PNG::PNG
    halfstep_cairo halfstep_asio LibArchive::LibArchive pugixml::pugixml ${halfstep_yaml} protobuf::libprotobuf-lite
    Threads::Threads ${CMAKE_DL_LIBS})
if(NOT HALFSTEP_NO_OPENMP)
  halfstep_require(OpenMP libgomp1 COMPONENTS CXX)
  list(APPEND HALFSTEP_PRIVATE_LIBRARIES OpenMP::OpenMP_CXX)
endif()
