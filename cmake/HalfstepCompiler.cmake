# SPDX-License-Identifier: Apache-2.0
# How everything in this project is compiled.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# Vector code is written explicitly; CMake's default -O3 would only add size. User-supplied flags take precedence.
if(CMAKE_CXX_FLAGS_RELEASE STREQUAL "-O3 -DNDEBUG")
  set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

set(halfstep_sanitize_options "")
if(HALFSTEP_SANITIZE)
  if(NOT HALFSTEP_SANITIZE MATCHES "^(address,undefined|thread)$")
    message(FATAL_ERROR "HALFSTEP_SANITIZE: expected 'address,undefined' or 'thread', got '${HALFSTEP_SANITIZE}'")
  endif()
  set(halfstep_sanitize_options -fsanitize=${HALFSTEP_SANITIZE} -fno-omit-frame-pointer)
  if(HALFSTEP_SANITIZE MATCHES "undefined")
    # A finding must fail the test, not only print a line.
    list(APPEND halfstep_sanitize_options -fno-sanitize-recover=undefined)
  endif()
endif()
# OpenMP is used only to make oneDNN's kernels run on the calling thread. The clang used for libFuzzer has no OpenMP
# headers, and the fuzz targets compute nothing.
set(HALFSTEP_NO_OPENMP OFF)
if(HALFSTEP_BUILD_FUZZERS)
  set(HALFSTEP_NO_OPENMP ON)
endif()

# Options of every target of this project. Contraction into fused multiply-adds is off, so that results don't depend on
# how the compiler groups expressions; kernels use fused operations explicitly.
function(halfstep_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -ffp-contract=off ${halfstep_sanitize_options})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC collects its own garbage, which takes a tenth of its time. Below 1 GB (here in kB) it doesn't: the largest
    # unit takes 1.32 GB of memory instead of 1.06.
    target_compile_options(${target} PRIVATE "SHELL:--param ggc-min-heapsize=1000000")
  endif()
  if(HALFSTEP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(HALFSTEP_SANITIZE)
    # Line numbers for the reports, without the weight of full debug information.
    target_compile_options(${target} PRIVATE -g1)
  endif()
  if(HALFSTEP_BUILD_FUZZERS)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link,address,undefined -g1)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
  if(HALFSTEP_NO_OPENMP)
    target_compile_definitions(${target} PRIVATE HALFSTEP_NO_OPENMP)
  endif()
  target_link_options(${target} PRIVATE ${halfstep_sanitize_options})
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# halfstep_precompile(TARGET HEADERS...): third-party and standard library headers, which take most of the compile time
# of a file. None of the project's own: each file includes the ones it uses, which a build without this option verifies.
function(halfstep_precompile target)
  if(HALFSTEP_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN} <algorithm> <cmath> <filesystem> <functional> <map> <memory> <mutex>
                              <optional> <string> <unordered_map> <vector>)
  endif()
endfunction()

# halfstep_group(VARIABLE NAME MOST SOURCES...): which group each source is in, as VARIABLE_SOURCE: as few groups as have
# MOST files at most, of equal size, called NAME_0, NAME_1 ...
function(halfstep_group variable name most)
  list(LENGTH ARGN count)
  math(EXPR groups "(${count} + ${most} - 1) / ${most}")
  math(EXPR size "(${count} + ${groups} - 1) / ${groups}")
  set(at 0)
  foreach(source ${ARGN})
    math(EXPR group "${at} / ${size}")
    math(EXPR at "${at} + 1")
    set("${variable}_${source}" "${name}_${group}" PARENT_SCOPE)
  endforeach()
endfunction()

# halfstep_unity(TARGET): half of the time to compile a file goes into the headers and templates that its neighbours
# use too. clang-tidy looks at each file by itself, which verifies that files don't depend on each other's includes.
function(halfstep_unity target)
  if(HALFSTEP_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    # The files of a folder in groups of 27 files at most: which ones doesn't depend on other folders. Groups of six take
    # a third more time together.
    get_target_property(sources ${target} SOURCES)
    set(folders "")
    foreach(source ${sources})
      if(source MATCHES "\\.cpp$")
        get_filename_component(folder "${source}" DIRECTORY)
        string(MAKE_C_IDENTIFIER "${target}_${folder}" folder)
        list(APPEND folders ${folder})
        list(APPEND files_${folder} "${source}")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES folders)
    foreach(folder ${folders})
      halfstep_group(group ${folder} 27 ${files_${folder}})
      foreach(source ${files_${folder}})
        set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${group_${source}}")
      endforeach()
    endforeach()
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # About types in anonymous namespaces that a class in the same file uses, which GCC can't see is a source file.
      target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
    endif()
  endif()
endfunction()

# halfstep_vector_groups(VARIABLE NAME SOURCES...): sources that Highway compiles for each instruction set by including
# them again, in groups of six files at most that it includes again as one; VARIABLE: the groups.
function(halfstep_vector_groups variable name)
  halfstep_group(group ${name} 6 ${ARGN})
  set(names "")
  foreach(source ${ARGN})
    list(APPEND names ${group_${source}})
    string(APPEND text_${group_${source}} "#include \"${PROJECT_SOURCE_DIR}/${source}\"\n")
  endforeach()
  list(REMOVE_DUPLICATES names)
  set(groups "")
  foreach(group ${names})
    set(file "${PROJECT_BINARY_DIR}/groups/${group}.cpp")
    set(again "#undef HWY_TARGET_INCLUDE\n#define HWY_TARGET_INCLUDE \"${file}\"\n")
    # Each of the files names itself as what to include again.
    file(CONFIGURE OUTPUT "${file}" CONTENT "${again}#include <hwy/foreach_target.h>\n${text_${group}}${again}")
    list(APPEND groups "${file}")
  endforeach()
  set(${variable} ${groups} PARENT_SCOPE)
endfunction()

# CPU kernels. On x86 the minimum is AVX2 (x86-64-v3); Highway compiles each kernel for AVX2 and for AVX-512 and chooses
# at run time. AES and PCLMUL are part of what Highway calls AVX2, but not of x86-64-v3.
function(halfstep_cpu_kernel_options target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(${target} PRIVATE -march=x86-64-v3 -maes -mpclmul)
    target_compile_definitions(${target} PRIVATE "HWY_DISABLED_TARGETS=(~(HWY_AVX2|HWY_AVX3))")
  endif()
  # Sums that the compiler keeps in registers take two to three times as long at -O2. Kernels whose vectors are written
  # out in full don't: measured, they are as fast (with the vectors of -O3 for their plain loops, without which softmax
  # takes twice as long), and -O3 takes half as long again to compile, or twice.
  target_compile_options(${target} PRIVATE -fno-math-errno -O3)
  set(written_out -O2)
  if(HALFSTEP_SANITIZE)
    # Checked kernels take twice as long to compile at -O3, and again twice as long with inline checks as with calls to
    # the runtime. One of the expensive optimizations cleans the upper halves of vectors.
    set(written_out -O1)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      list(APPEND written_out -fexpensive-optimizations)
      if(HALFSTEP_SANITIZE MATCHES "address")
        target_compile_options(${target} PRIVATE "SHELL:--param asan-instrumentation-with-call-threshold=0")
        # With detect_stack_use_after_return variables lie in frames of the runtime's own, where GCC 12 places vectors
        # of 64 bytes at odd multiples of 32 (GCC's bug 110027) and moves them by instructions that fault there. The
        # assembler takes the unaligned ones instead.
        include(CheckCXXCompilerFlag)
        check_cxx_compiler_flag(-Wa,-muse-unaligned-vector-move HALFSTEP_HAS_UNALIGNED_VECTOR_MOVE)
        if(HALFSTEP_HAS_UNALIGNED_VECTOR_MOVE)
          target_compile_options(${target} PRIVATE -Wa,-muse-unaligned-vector-move)
        endif()
      endif()
    endif()
    target_compile_options(${target} PRIVATE ${written_out})
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND written_out -fvect-cost-model=dynamic)
    # Where GCC 12 knows which registers a callee leaves alone, it assumes that the upper halves of vectors are clean
    # after the call and ends the function without vzeroupper. The thread's SSE code is up to 16 times slower then,
    # until a kernel cleans them.
    target_compile_options(${target} PRIVATE -fno-ipa-ra)
  endif()
  set(quick "")
  foreach(name activation arithmetic compare copy dropout norm_batch norm_batch_backward unary binary softmax where)
    list(APPEND quick "halfstep/backends/cpu/${name}.cpp")
  endforeach()
  if(HALFSTEP_UNITY)
    get_target_property(sources ${target} SOURCES)
    foreach(source ${sources})
      file(STRINGS "${source}" again REGEX "hwy/foreach_target" LIMIT_COUNT 1)
      if(NOT again)
        list(APPEND plain "${source}")
      elseif(source IN_LIST quick)
        list(APPEND quick_vectors "${source}")
      else()
        list(APPEND vectors "${source}")
      endif()
    endforeach()
    halfstep_vector_groups(groups vectors ${vectors})
    halfstep_vector_groups(quick_groups quick_vectors ${quick_vectors})
    set_target_properties(${target} PROPERTIES SOURCES "${plain};${groups};${quick_groups}")
    set_source_files_properties(${groups} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    list(APPEND quick ${quick_groups})
  endif()
  # CMake leaves sources with options of their own out of groups.
  foreach(source ${quick})
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS ${written_out})
  endforeach()
  if(HALFSTEP_BUILD_FUZZERS)
    # Fuzz targets read files and compute nothing: without sanitizers kernels take a fraction of the time to compile.
    target_compile_options(${target} PRIVATE -O1 -fno-sanitize=all)
  endif()
  if(HALFSTEP_SANITIZE MATCHES "undefined")
    # Measured: with both sanitizers a kernel takes three times as long to compile as with none, with the address
    # sanitizer alone less than twice, and memory is where kernels go wrong.
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()
