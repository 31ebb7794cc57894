// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks a class or function as part of the shared library's interface.
///
/// The library is built with hidden visibility: whatever a program outside the library calls, and every exception class
/// that it may catch, carries this mark. Templates and inline functions need none.
#if defined(_WIN32)
#if defined(HALFSTEP_BUILDING)
#define HS_API __declspec(dllexport)
#else
#define HS_API __declspec(dllimport)
#endif
#else
#define HS_API __attribute__((visibility("default")))
#endif
