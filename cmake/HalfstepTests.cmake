# SPDX-License-Identifier: Apache-2.0
# halfstep_add_tests(DIR SOURCES...): a program test_DIR; its suites are listed when ctest runs, one entry each.
# One entry a suite, not a test: suites share costly fixtures, and thousands of processes would cost more than the tests.

function(halfstep_add_tests dir)
  halfstep_add_test_program(${dir} ${ARGN})
  halfstep_list_suites(${dir} "" "${HALFSTEP_TEST_ENVIRONMENT}")
endfunction()

# halfstep_add_test_program(DIR SOURCES...): the program alone.
function(halfstep_add_test_program dir)
  set(target test_${dir})
  add_executable(${target} ${ARGN} "${PROJECT_SOURCE_DIR}/tests/support/main.cpp")
  halfstep_compile_options(${target})
  target_compile_options(${target} PRIVATE ${halfstep_test_options})
  target_link_libraries(${target} PRIVATE halfstep_test_support)
  if(HALFSTEP_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM halfstep_test_headers)
  endif()
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  if(TARGET halfstep_cli AND dir MATCHES "^(cli|train)$")
    add_dependencies(${target} halfstep_cli)
  endif()
endfunction()

# halfstep_list_suites(DIR DEVICE ENVIRONMENT [PREFIX [PROCESSES LAUNCHER...]]): the suites of test_DIR as ctest entries
# PREFIX.DIR.SUITE (by default the device's kind), with tensors made on DEVICE. With a launcher: PREFIX.SUITE, as so many
# processes.
function(halfstep_list_suites dir device environment)
  set(target test_${dir})
  set(prefix "${device}")
  if(ARGC GREATER 3)
    set(prefix "${ARGV3}")
  endif()
  set(processes 1)
  set(launcher "")
  if(ARGC GREATER 5)
    set(processes "${ARGV4}")
    set(launcher "${ARGN}")
    list(SUBLIST launcher 2 -1 launcher)
  endif()
  set(suites "${CMAKE_CURRENT_BINARY_DIR}/${target}_${prefix}_suites.cmake")
  set(loader "${CMAKE_CURRENT_BINARY_DIR}/${target}_${prefix}_loader.cmake")
  file(GENERATE OUTPUT "${loader}" CONTENT
"set(cmake [==[${CMAKE_COMMAND}]==])
set(program [==[$<TARGET_FILE:${target}>]==])
set(dir [==[${dir}]==])
set(suites [==[${suites}]==])
set(environment [==[${environment}]==])
set(device [==[${device}]==])
set(prefix [==[${prefix}]==])
set(launcher [==[${launcher}]==])
set(processes ${processes})
include([==[${PROJECT_SOURCE_DIR}/cmake/HalfstepListSuites.cmake]==])
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${loader}")
endfunction()
