# SPDX-License-Identifier: Apache-2.0
# Run by ctest: asks a test program for its suites and makes a ctest entry of each.
# In: cmake (the path of CMake), program, dir, suites (the file to write), environment, device (where its tensors are made;
# empty: the CPU), prefix (of the entries' names, with a device), launcher (a command that runs the program as several
# processes, a list; then prefix is that of the names, and processes how many there are).

set(names "${dir}")
set(options "")
if(device)
  set(names "${prefix}.${dir}")
  set(options " --device ${device}")
endif()

set(command "[==[${program}]==]")
set(properties "")
if(launcher)
  set(names "${prefix}")
  set(command "")
  foreach(word IN LISTS launcher program)
    string(APPEND command "[==[${word}]==] ")
  endforeach()
  set(properties " PROCESSORS ${processes}")
endif()

if(NOT EXISTS "${program}")
  add_test("${names}.NOT_BUILT" "${program}")
  return()
endif()
if("${program}" IS_NEWER_THAN "${suites}" OR "${CMAKE_CURRENT_LIST_FILE}" IS_NEWER_THAN "${suites}")
  execute_process(COMMAND "${cmake}" -E env ${environment} "${program}" --gtest_list_tests
                  OUTPUT_VARIABLE listing ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${program} --gtest_list_tests: ${status}\n${listing}\n${errors}")
  endif()
  string(REGEX REPLACE "[][;]" "_" listing "${listing}")
  string(REPLACE "\n" ";" listing "${listing}")
  set(script "")
  foreach(line IN LISTS listing)
    if(NOT line MATCHES "^([A-Za-z_][A-Za-z0-9_/]*)\\.( .*)?$")
      continue()
    endif()
    set(suite "${CMAKE_MATCH_1}")
    set(name "${names}.${suite}")
    set(label "unit")
    set(timeout 300)
    if(launcher)
      set(timeout 120)
    endif()
    if(suite MATCHES "Slow(/[0-9]+)?$")
      set(label "slow")
      set(timeout 1800)
    endif()
    # The suite is "skipped" only when not one of its tests ran: gtest's summary then ends with the skipped ones.
    string(APPEND script "add_test([==[${name}]==] ${command} [==[--gtest_filter=${suite}.*]==] --gtest_brief=0${options})\n"
      "set_tests_properties([==[${name}]==] PROPERTIES LABELS ${label} TIMEOUT ${timeout}${properties} "
      "ENVIRONMENT [==[${environment}]==] SKIP_REGULAR_EXPRESSION [==[\\[  PASSED  \\] 0 tests\\.\n(\\[  SKIPPED \\] [^\n]*\n)+$]==])\n")
  endforeach()
  file(WRITE "${suites}" "${script}")
endif()
include("${suites}")
