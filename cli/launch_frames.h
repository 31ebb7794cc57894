// SPDX-License-Identifier: Apache-2.0
// What the parts of `halfstep launch` on several machines (launch_nodes.h) say to each other: texts with their length.
#pragma once

#include <string>
#include <string_view>

#include "cli/launch_channel.h"
#include "cli/launch_nodes.h"

namespace halfstep::cli {

/// The variable with the machines for the agent.
inline constexpr const char* kNodesVariable = "HALFSTEP_LAUNCH_NODES";
/// How the folder of the agent begins.
inline constexpr const char* kAgentFolder = "/tmp/halfstep-nodes-";
/// How long a text that has begun may take.
inline constexpr int kFrameSeconds = 10;

/// Returns false if it can't be sent.
bool send_frame(int socket, std::string_view text);
/// Waits for the next text, `seconds` for each piece of it (-1: for ever). Returns false at the end, and for what no
/// `launch` sends.
bool receive_frame(int socket, std::string& text, int seconds);

/// Waits for node 0 to answer, ten minutes at most; then throws UsageError.
File connect_to_node_0(const NodeTask& task);

}  // namespace halfstep::cli
