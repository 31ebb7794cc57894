# SPDX-License-Identifier: Apache-2.0
# `make install`: the library with its headers and CMake package, the program, and oneDNN beside the library. Plug-ins
# (the simulated device, NVIDIA GPUs) install themselves, into halfstep/plugins beside the library, where it looks.
include(CMakePackageConfigHelpers)

install(TARGETS halfstep EXPORT HalfstepTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/halfstep" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h"
        PATTERN "*-inl.h" EXCLUDE
        PATTERN "*_internal.h" EXCLUDE
        PATTERN "fail.h" EXCLUDE
        PATTERN "backends" EXCLUDE)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(halfstep_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Halfstep)
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/HalfstepConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/HalfstepConfig.cmake" INSTALL_DESTINATION ${halfstep_package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/HalfstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(EXPORT HalfstepTargets NAMESPACE Halfstep:: DESTINATION ${halfstep_package_dir})
install(FILES "${PROJECT_BINARY_DIR}/HalfstepConfig.cmake" "${PROJECT_BINARY_DIR}/HalfstepConfigVersion.cmake"
        DESTINATION ${halfstep_package_dir})

# A oneDNN that the system's package manager does not look after travels with the library, with its licence.
get_target_property(halfstep_dnnl_file DNNL::dnnl IMPORTED_LOCATION_RELEASE)
if(halfstep_dnnl_file AND NOT halfstep_dnnl_file MATCHES "^/usr/lib")
  get_filename_component(halfstep_dnnl_dir "${halfstep_dnnl_file}" DIRECTORY)
  get_filename_component(halfstep_dnnl_prefix "${halfstep_dnnl_dir}" DIRECTORY)
  get_filename_component(halfstep_dnnl_real "${halfstep_dnnl_file}" REALPATH)
  get_target_property(halfstep_dnnl_soname DNNL::dnnl IMPORTED_SONAME_RELEASE)
  install(FILES "${halfstep_dnnl_real}" DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${halfstep_dnnl_soname})
  install(DIRECTORY "${halfstep_dnnl_prefix}/share/doc/onednn" DESTINATION ${CMAKE_INSTALL_DOCDIR} OPTIONAL)
endif()
