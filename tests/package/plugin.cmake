# SPDX-License-Identifier: Apache-2.0
# cmake -D BUILD=build folder -D SOURCE=examples/plugin -D COMPILER=C++ compiler -P plugin.cmake
# The device of docs/devices/bring-up-a-device.md as an outside project: built against an installed Halfstep, found by
# the installed program, trained on, with its kernels and without any; and the build's tests of ops on it.

# run(EXPECTED_STATUS COMMAND...): leaves what it says in `output`.
function(run expected)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL expected)
    message(FATAL_ERROR "${ARGN}\n${output}\nstatus ${status}, expected ${expected}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
function(expect pattern)
  if(NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "expected '${pattern}' in\n${output}")
  endif()
endfunction()

# It is shown as something small.
set(most_lines 399)
file(GLOB_RECURSE sources "${SOURCE}/*.cpp" "${SOURCE}/*.h")
set(lines 0)
foreach(source ${sources})
  file(READ "${source}" text)
  string(REGEX MATCHALL "\n" ends "${text}")
  list(LENGTH ends count)
  math(EXPR lines "${lines} + ${count}")
endforeach()
if(lines GREATER most_lines)
  message(FATAL_ERROR "${sources}: expected at most ${most_lines} lines, got ${lines}")
endif()

set(work "${BUILD}/plugin-test")
file(REMOVE_RECURSE "${work}")
run(0 "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${work}/halfstep")
run(0 "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${work}/build" -DCMAKE_BUILD_TYPE=Release
    "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${work}/halfstep" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON)
run(0 "${CMAKE_COMMAND}" --build "${work}/build")
set(plugin "${work}/build/libhalfstep_example.so")
# It stands on the headers alone.
run(0 ldd "${plugin}")
if(output MATCHES "libhalfstep\\.so")
  message(FATAL_ERROR "the plug-in links to the library:\n${output}")
endif()

set(plain "${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH --unset=HALFSTEP_PLUGINS)
set(program "${work}/halfstep/bin/halfstep")
run(0 ${plain} "HALFSTEP_PLUGINS=${plugin}" "${program}" devices example --ops)
expect("example:0: Example device")
expect("\nrelu +native: f32 f16 bf16 \\(contiguous tensors\\); on the CPU: f64 [^\n]*\\(computed in f32, f16 and bf16 only\\)")
expect("\nto +native: [^\n]*f32 f16 bf16")
expect("\nmm +on the CPU: ")

# The same training on the CPU and on the device. Products are summed up in another order, so that values in 16 bits
# differ in the last place now and then: of the 10 000 test images, at most 100 may be taken for something else.
set(train train mlp --amp f16 --epochs 1 --limit 2000 --lr 0.1 --no-out)
set(bound 100)  # hundredths of a percent, which are images
foreach(device cpu example)
  run(0 ${plain} "HALFSTEP_PLUGINS=${plugin}" "${program}" ${train} --device ${device})
  expect("completed in [^\n]* top1 ([0-9]+)\\.([0-9][0-9])%, 0 steps skipped")
  string(REGEX REPLACE ".*completed in [^\n]* top1 ([0-9]+)\\.([0-9][0-9])%.*" "\\1\\2" ${device} "${output}")
endforeach()
message(STATUS "top1 in hundredths of a percent: ${cpu} on the CPU, ${example} on the device; ${lines} lines")
math(EXPR apart "${cpu} - ${example}")
if(apart GREATER bound OR apart LESS -${bound})
  message(FATAL_ERROR "top1 differs by more than ${bound} hundredths of a percent")
endif()
if(example LESS 5000)
  message(FATAL_ERROR "expected a network that has learnt something, got top1 of ${example} hundredths of a percent")
endif()
# What it has no kernels for is said: once as it happens, and in a table at the end.
expect("warning: mm: example:0 has no kernel for f16; it runs on the CPU")
expect("ops that ran on the CPU in place of example:0:\n")
foreach(op mm sgd_step amp_check relu_backward)
  expect("\n  ${op} +[0-9]+ calls +[0-9.]+ MB to the CPU")
endforeach()
if(output MATCHES "\n  (linear|relu|to|copy|clone) +[0-9]+ calls")
  message(FATAL_ERROR "${CMAKE_MATCH_1} has a kernel, but ran on the CPU:\n${output}")
endif()

run(1 ${plain} "HALFSTEP_PLUGINS=${plugin}" HALFSTEP_FALLBACK=0 "${program}" ${train} --device example)
expect("example:0 has [^\n]*HALFSTEP_FALLBACK")

# The page promises that a device without a single kernel trains, to the same bits as the CPU: it is all copies.
file(COPY "${SOURCE}/" DESTINATION "${work}/bare")
file(READ "${work}/bare/example_device.cpp" text)
string(REPLACE "t.kernel = kernel;" "t.kernel = [](const char*, int32_t, int32_t, halfstep_kernel*) -> halfstep_status {
    (void)kernel;
    return HALFSTEP_UNSUPPORTED;
  };" bare "${text}")
if(bare STREQUAL text)
  message(FATAL_ERROR "${SOURCE}/example_device.cpp: expected 't.kernel = kernel;'")
endif()
file(WRITE "${work}/bare/example_device.cpp" "${bare}")
run(0 "${CMAKE_COMMAND}" -S "${work}/bare" -B "${work}/bare/build" -DCMAKE_BUILD_TYPE=Debug
    "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${work}/halfstep")
run(0 "${CMAKE_COMMAND}" --build "${work}/bare/build")
foreach(device cpu example)
  run(0 ${plain} "HALFSTEP_PLUGINS=${work}/bare/build/libhalfstep_example.so" "${program}" ${train} --device ${device}
      --log-json "${work}/${device}.jsonl")
  file(READ "${work}/${device}.jsonl" log)
  string(REGEX MATCHALL "\"(loss|top1|top5)\": *[^,}]*" ${device}_losses "${log}")
endforeach()
list(LENGTH cpu_losses losses)
if(losses LESS 32 OR NOT cpu_losses STREQUAL example_losses)
  message(FATAL_ERROR "expected the same 32 losses or more:\n${cpu_losses}\non a device without kernels:\n${example_losses}")
endif()
expect("\n  linear +[0-9]+ calls +[0-9.]+ MB to the CPU")

# And that the tests pass on the example.
foreach(dir ops autograd amp nn optim)
  run(0 "${CMAKE_COMMAND}" -E env "HALFSTEP_PLUGINS=${plugin}" "${BUILD}/tests/test_${dir}" --device example
      --gtest_filter=-*Slow*)
  expect("PASSED  . [1-9][0-9]* tests")
endforeach()

# A name without a folder is a file here, not one that the system looks for.
run(0 "${CMAKE_COMMAND}" -E chdir "${work}/build" ${plain} HALFSTEP_PLUGINS=libhalfstep_example.so "${program}" devices)
expect("example:0: Example device")

# Where vendors' packages put it, nobody has to name it.
file(GLOB library "${work}/halfstep/lib*/libhalfstep.so" "${work}/halfstep/lib*/*/libhalfstep.so")
get_filename_component(folder "${library}" DIRECTORY)
file(COPY "${plugin}" DESTINATION "${folder}/halfstep/plugins")
run(0 ${plain} "${program}" devices)
expect("example:0: Example device")
file(REMOVE_RECURSE "${work}")
