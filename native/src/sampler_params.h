// sampler_params.h - a request's sampling fields as llama.cpp's structure.
#pragma once

#include <string>

#include "common.h"
#include "json.h"

// Field names and defaults are llama-server's.  Differences, all deliberate: an unknown sampler
// name is an error, a random seed is drawn here (so that the seed reported reproduces *every*
// sampler of the chain), and windows of -1 or beyond any context mean the model's trained context.
// Throws gufo_failure(GUFO_E_INVALID, "<field>: <reason>").
common_params_sampling gufo_sampling_params(const llama_model * model, const common_json & j);
