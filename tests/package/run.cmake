# SPDX-License-Identifier: Apache-2.0
# cmake -D BUILD=build folder -D SOURCE=this folder -D SIM=the simulated accelerator's folder -D COMPILER=C++ compiler
#       -P run.cmake

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${output}\nstatus ${status}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(work "${BUILD}/package-test")
file(REMOVE_RECURSE "${work}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${work}/first")
# The installed tree is moved before it is used: nothing in it may remember where it was built or installed.
file(RENAME "${work}/first" "${work}/moved")

file(GLOB_RECURSE headers RELATIVE "${work}/moved/include" "${work}/moved/include/*")
foreach(header ${headers})
  if(header MATCHES "(-inl\\.h|/fail\\.h|/backends/.*)$" OR NOT header MATCHES "\\.h$")
    message(FATAL_ERROR "${header} is internal, but was installed")
  endif()
endforeach()

run("${CMAKE_COMMAND}" -S "${SOURCE}" -B "${work}/build" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_COMPILER=${COMPILER}"
    "-DCMAKE_PREFIX_PATH=${work}/moved")
run("${CMAKE_COMMAND}" --build "${work}/build")
run("${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH "${work}/build/outside")
message(STATUS "outside project: ${output}")
# The program runs on the oneDNN that was installed beside the library.
file(GLOB onednn "${work}/moved/lib*/libdnnl.so.3" "${work}/moved/lib*/*/libdnnl.so.3")
if(onednn)
  run(ldd "${work}/build/outside")
  if(NOT output MATCHES "libdnnl.so.3 => [^\n]*/package-test/moved/")
    message(FATAL_ERROR "libdnnl.so.3 is not taken from beside the library:\n${output}")
  endif()
  file(GLOB_RECURSE licence "${work}/moved/share/doc/*/onednn/LICENSE")
  if(NOT licence)
    message(FATAL_ERROR "oneDNN was installed without its licence")
  endif()
endif()
if(EXISTS "${work}/moved/bin/halfstep")
  run("${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH "${work}/moved/bin/halfstep" --version)
endif()
# The simulated device comes along: README's `--device sim` works with what was installed.
set(plain "${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH --unset=HALFSTEP_PLUGINS --unset=HALFSTEP_PLUGIN_DIR)
if(EXISTS "${work}/moved/bin/halfstep")
  run(${plain} "${work}/moved/bin/halfstep" devices)
  if(NOT output MATCHES "sim:0: Simulated accelerator")
    message(FATAL_ERROR "the simulated device was not installed, or not found:\n${output}")
  endif()
  run(${plain} "${work}/moved/bin/halfstep" train mlp --device sim --epochs 1 --limit 128 --no-out)
  file(GLOB installed "${work}/moved/lib*/halfstep/plugins/libhalfstep_sim.so"
       "${work}/moved/lib*/*/halfstep/plugins/libhalfstep_sim.so")
  file(REMOVE ${installed})
endif()
# A device from outside: built from the installed headers, installed beside the library, found there.
if(SIM)
  run("${CMAKE_COMMAND}" -S "${SIM}" -B "${work}/sim" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_COMPILER=${COMPILER}"
      "-DCMAKE_PREFIX_PATH=${work}/moved")
  run("${CMAKE_COMMAND}" --build "${work}/sim" --parallel 2)
  run("${CMAKE_COMMAND}" --install "${work}/sim" --prefix "${work}/moved")
  if(EXISTS "${work}/moved/bin/halfstep")
    run(${plain} "${work}/moved/bin/halfstep" devices)
    if(NOT output MATCHES "sim:0: Simulated accelerator")
      message(FATAL_ERROR "the installed plug-in was not found:\n${output}")
    endif()
  endif()
endif()
file(REMOVE_RECURSE "${work}")
