// Peak bytes of a program on each device, found by going through its instructions.
//
// What passes, slabs and buffers take comes as numbers from megatron_flex/planner/footprint.py,
// where the words used here are explained; here is only when. tests/oracles/footprint.py is the
// same in Python; the tests ask for the same bits.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "api.h"
#include "program.h"

// Mirrored by megatron_flex/planner/footprint.py; all fields are eight bytes.
struct mflex_footprint_problem {
  int64_t devices, stages, batches, slabs, chains;
  int64_t posted;                 // receives that are posted ahead
  int64_t window;                 // offloaded states that are worked on at a time
  int64_t divided;                // devices of a server, between which messages come in shares; 0
  double boundary;                // bytes of a token between units
  double share;                   // of it in a message that comes in shares
  double keys_values, gradients;  // of one attention unit, a token of a chain
  double tables;                  // rotary tables, a token of a chain
  const uint64_t* words;
  const int64_t* word_offset;    // [devices + 1], into words
  const int64_t* tokens;         // [batches]
  const int64_t* sliced;         // [batches], tokens of a slice of a longer sample
  const int64_t* chain;          // [batches], -1: in none
  const int64_t* chain_ends;     // [chains, 2], first and last micro-batch
  const double* chain_tokens;    // [chains]
  const int64_t* moves;          // [stages], activations of some units travel
  const double* pass;            // [stages, 5]: left, travels, output, context, owed
  const int64_t* line_offset;    // [stages, 4 passes] + 1, into line
  const double* line;            // [., 2]: fixed, token
  const double* slice;           // [stages, 8]: left, travels (fixed, token, sliced), units, owed
  const int64_t* slice_offset;   // [stages, 3 passes] + 1, into slice_line
  const double* slice_line;      // [., 5]: fixed, token, sliced, own, before
  const int64_t* weight_offset;  // [stages + 1], into weight_line: the weight half of slices
  const double* weight_line;     // [., 2]
  const double* held;            // [devices], bytes of slabs at first
  const int64_t* held_offset;    // [devices + 1], into held_slab
  const int64_t* held_slab;
  const double* held_bytes;
  const int64_t* offloaded;     // [slabs], state on the host: 1 now, 2 then
  const double* joined;         // [slabs], bytes of one that joins
  const double* swap;           // [slabs], bytes while an offloaded state is worked on
  const int64_t* recut_offset;  // [devices + 1], into recut_slab
  const int64_t* recut_slab;
  const double* recut;  // [., 3]: bytes taken early, taken more by the update, after it
  double* peak;         // [devices, 2], up to the global norm and after it, out
};

namespace mflex {
namespace {

enum Lines { kForwardLines, kBackwardLines, kInputLines, kWeightLines };

double highest(const double* line, const double* end, double tokens) {
  double most = line[0] + line[1] * tokens;
  for (line += 2; line != end; line += 2) most = std::max(most, line[0] + line[1] * tokens);
  return most;
}

class Replay {
 public:
  explicit Replay(const mflex_footprint_problem& p)
      : p_(p),
        slab_(p.slabs),
        has_(p.slabs),
        swapped_(p.slabs),
        cut_(p.slabs),
        context_(p.batches),
        has_context_(p.batches),
        left_(p.batches),
        began_(p.stages * p.batches),
        goes_(p.stages * p.batches),
        chains_(p.chains) {}

  void run(int64_t device, double* peaks) {
    begin(device);
    post();
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      if (is_compute(step.op)) {
        delivered(step.under_way());
        if (any_goes_) travel();
        if (step.op == kForward) {
          forward(step);
        } else if (step.op == kBackwardWeight) {
          backward_weight(step);
        } else {
          backward(step);
        }
        ++computed_;
      } else if (is_transfer(step.op)) {
        transfer(step);
      } else if (step.op == kRecvState) {
        take(join(step.slab()));
      } else if (step.op == kRecut) {
        recut(device, step.slab());
      } else if (step.op == kGlobalNorm) {
        delivered(0);
        finish(i + 1, peaks);
        return;
      }
    }
    peaks[0] = peak_, peaks[1] = used_;
  }

 private:
  // Bytes that a cut by the update takes before it gives up the present state, and in all.
  struct Cut {
    bool is = false;
    double more = 0.0, change = 0.0;
  };
  // What the device holds of one sample that is cut: stages whose units have its keys.
  struct Chain {
    std::vector<int64_t> held;
    double tables = 0.0;
  };

  void begin(int64_t device) {
    used_ = peak_ = p_.held[device];
    leaving_ = 0.0;
    posted_ = 0;
    sent_.clear();
    gone_ = 0;
    next_expected_ = computed_ = 0;
    for (auto* flags : {&has_, &swapped_, &has_context_})
      std::fill(flags->begin(), flags->end(), 0);
    std::fill(cut_.begin(), cut_.end(), Cut());
    std::fill(left_.begin(), left_.end(), 0);
    std::fill(chains_.begin(), chains_.end(), Chain());
    for (int64_t i = p_.held_offset[device]; i < p_.held_offset[device + 1]; ++i) {
      const int64_t slab = p_.held_slab[i];
      has_[slab] = 1;
      slab_[slab] = p_.held_bytes[i];
      swapped_[slab] = p_.offloaded[slab] & 1;
    }
    steps_.clear();
    expected_.clear();
    device_ = device;
    evaluates_ = true;
    Reader list(p_.words + p_.word_offset[device], p_.words + p_.word_offset[device + 1]);
    while (!list.done()) {
      const Step step = list.take();
      steps_.push_back(step);
      if (is_receive(step.op)) expected_.push_back(posted_bytes(step));
      if (is_compute(step.op)) ++left_[step.batch()];
      if (step.op == kBackward || step.op == kBackwardInput) evaluates_ = false;
    }
    leave_and_return();
  }

  // Which passes' activations go to the host, as megatron_flex/schedule/residency.py has it.
  void leave_and_return() {
    any_goes_ = false;
    if (std::none_of(p_.moves, p_.moves + p_.stages, [](int64_t m) { return m != 0; })) return;
    std::fill(began_.begin(), began_.end(), -1);
    std::fill(goes_.begin(), goes_.end(), 0);
    returns_.clear();
    int64_t number = 0;
    for (const Step& step : steps_) {
      if (!is_compute(step.op)) continue;
      returns_.push_back(-1);
      const int64_t key = step.stage() * p_.batches + step.batch();
      if (p_.moves[step.stage()]) {
        if (step.op == kForward) {
          began_[key] = number;
        } else if (began_[key] >= 0) {  // its first backward operation
          if (number - began_[key] > 2) {
            any_goes_ = true;
            goes_[key] = 1;
            returns_[number - 1] = key;
          }
          began_[key] = -1;
        }
      }
      ++number;
    }
  }

  void take(double size) {
    used_ += size;
    peak_ = std::max(peak_, used_);
  }
  void reach(double size) { peak_ = std::max(peak_, size); }

  double tokens(int64_t batch) const { return static_cast<double>(p_.tokens[batch]); }
  double sliced(int64_t batch) const { return static_cast<double>(p_.sliced[batch]); }
  bool in_chain(const Step& step) const { return p_.chain[step.batch()] >= 0; }

  // ---- messages --------------------------------------------------------------------------------

  void post() {
    while (next_expected_ < expected_.size() && posted_ < p_.posted) {
      take(expected_[next_expected_++]);
      ++posted_;
    }
  }

  // Whether a message comes from another server, in a share for each rank of the device.
  bool in_shares(const Step& step) const {
    return p_.divided && step.peer() / p_.divided != device_ / p_.divided;
  }
  double posted_bytes(const Step& step) const {
    return (in_shares(step) ? p_.share : p_.boundary) * tokens(step.batch());
  }

  void transfer(const Step& step) {
    if (is_receive(step.op)) {
      --posted_;  // its buffer goes on as an activation or a gradient
      post();
      if (in_shares(step)) {  // once the whole has been gathered in another
        take(p_.boundary * tokens(step.batch()));
        used_ -= posted_bytes(step);
      }
    } else {
      sent_.push_back(p_.boundary * tokens(step.batch()));
    }
  }

  // All but the last messages have been taken.
  void delivered(int64_t under_way) {
    for (; gone_ + under_way < static_cast<int64_t>(sent_.size()); ++gone_) used_ -= sent_[gone_];
  }

  // What the pass before saved has left, and what the next one needs comes back.
  void travel() {
    used_ -= leaving_;
    leaving_ = 0.0;
    const int64_t key = returns_[computed_];
    if (key >= 0) take(travels(key / p_.batches, key % p_.batches));
  }

  // ---- passes ----------------------------------------------------------------------------------

  const double* pass(int64_t stage) const { return p_.pass + 5 * stage; }
  double output(int64_t stage) const { return pass(stage)[2]; }
  double context(int64_t stage) const { return pass(stage)[3]; }
  const double* slice(int64_t stage) const { return p_.slice + 8 * stage; }
  double units(int64_t stage) const { return slice(stage)[6]; }

  static double level(const double* l, double tokens, double sliced) {
    return l[0] + l[1] * tokens + l[2] * sliced;
  }

  double highest_of(int64_t stage, Lines which, double tokens) const {
    const int64_t* offset = p_.line_offset + 4 * stage + which;
    return highest(p_.line + 2 * offset[0], p_.line + 2 * offset[1], tokens);
  }

  double highest_slice(int64_t stage, Lines which, int64_t batch, double begun,
                       double ended) const {
    const int64_t* offset = p_.slice_offset + 3 * stage + which;
    double most = 0.0;
    for (int64_t i = offset[0]; i < offset[1]; ++i) {
      const double* l = p_.slice_line + 5 * i;
      const double size = level(l, tokens(batch), sliced(batch)) + l[3] * begun - l[4] * ended;
      most = i == offset[0] ? size : std::max(most, size);
    }
    return most;
  }

  // Bytes that a pass's activations on their way to the host free.
  double travels(int64_t stage, int64_t batch) const {
    if (p_.chain[batch] >= 0) return level(slice(stage) + 3, tokens(batch), sliced(batch));
    return pass(stage)[1] * tokens(batch);
  }

  // Bytes that a forward leaves to its backward, with its output.
  double left(const Step& step) const {
    const int64_t stage = step.stage(), batch = step.batch();
    if (in_chain(step)) {
      return level(slice(stage), tokens(batch), sliced(batch)) + output(stage) * tokens(batch);
    }
    return (pass(stage)[0] + output(stage)) * tokens(batch);
  }

  double owed(const Step& step) const {
    return (in_chain(step) ? slice(step.stage())[7] : pass(step.stage())[4]) * tokens(step.batch());
  }

  void forward(const Step& step) {
    const int64_t stage = step.stage(), batch = step.batch();
    if (context(stage) != 0.0 && !has_context_[batch]) {
      has_context_[batch] = 1;
      context_[batch] = context(stage) * tokens(batch);
      take(context_[batch]);
    }
    const double source = stage ? p_.boundary * tokens(batch) : 0.0;  // in use already
    const double base = used_ - source;
    if (in_chain(step)) {
      forward_slice(step, base);
    } else {
      reach(base + highest_of(stage, kForwardLines, tokens(batch)));
    }
    used_ += left(step) - source;
    if (any_goes_ && goes_[stage * p_.batches + batch]) leaving_ = travels(stage, batch);
    done(step);
  }

  // The peak of the pass, and the buffers: the first slice makes them.
  void forward_slice(const Step& step, double base) {
    const int64_t stage = step.stage(), batch = step.batch(), c = p_.chain[batch];
    Chain& chain = chains_[c];
    const double keys = p_.keys_values * p_.chain_tokens[c];
    const double makes = batch == p_.chain_ends[2 * c] ? keys : 0.0;
    if (makes != 0.0 && units(stage) != 0.0 && chain.held.empty()) {
      chain.tables = p_.tables * p_.chain_tokens[c];
      used_ += chain.tables;
      base += chain.tables;
    }
    const double frees = evaluates_ && batch == p_.chain_ends[2 * c + 1] ? keys : 0.0;
    reach(base + highest_slice(stage, kForwardLines, batch, makes, 0.0));
    used_ += units(stage) * (makes - frees);
    if (units(stage) != 0.0 &&
        std::find(chain.held.begin(), chain.held.end(), stage) == chain.held.end()) {
      chain.held.push_back(stage);
    }
    if (frees != 0.0) freed(stage, &chain);
  }

  // A stage has given up its buffers; the last one also the rotary tables.
  void freed(int64_t stage, Chain* chain) {
    auto& held = chain->held;
    held.erase(std::remove(held.begin(), held.end(), stage), held.end());
    if (held.empty()) {
      used_ -= chain->tables;
      chain->tables = 0.0;
    }
  }

  // The peak of the pass; the last slice makes the gradients' buffers, the first frees all. `base`
  // is what is in use besides what the forward left.
  void backward_slice(const Step& step, double base) {
    const int64_t stage = step.stage(), batch = step.batch(), c = p_.chain[batch];
    const double gradients = p_.gradients * p_.chain_tokens[c];
    const double makes = batch == p_.chain_ends[2 * c + 1] ? gradients : 0.0;
    const double frees =
        batch == p_.chain_ends[2 * c] ? gradients + p_.keys_values * p_.chain_tokens[c] : 0.0;
    const Lines lines = step.op == kBackwardInput ? kInputLines : kBackwardLines;
    reach(base + highest_slice(stage, lines, batch, makes, frees));
    used_ += units(stage) * (makes - frees);
    if (frees != 0.0) freed(stage, &chains_[c]);
  }

  void backward(const Step& step) {
    const int64_t stage = step.stage(), batch = step.batch();
    // What the forward left, and the gradient of its output, are in use already.
    const double kept = left(step);
    const bool split = step.op == kBackwardInput;
    if (in_chain(step)) {
      backward_slice(step, used_ - kept);
    } else {
      reach(used_ - kept + highest_of(stage, split ? kInputLines : kBackwardLines, tokens(batch)));
    }
    used_ += (stage ? p_.boundary * tokens(batch) : 0.0) - kept;
    used_ += split ? owed(step) : 0.0;
    done(step);
  }

  void backward_weight(const Step& step) {
    const int64_t stage = step.stage();
    used_ -= owed(step);
    const int64_t* offset =
        in_chain(step) ? p_.weight_offset + stage : p_.line_offset + 4 * stage + kWeightLines;
    const double* line = in_chain(step) ? p_.weight_line : p_.line;
    if (offset[0] != offset[1]) {
      const double* last = line + 2 * offset[1];
      reach(used_ + highest(line + 2 * offset[0], last, tokens(step.batch())));
    }
    done(step);
  }

  void done(const Step& step) {
    if (--left_[step.batch()] || !has_context_[step.batch()]) return;
    has_context_[step.batch()] = 0;
    used_ -= context_[step.batch()];
  }

  // ---- slabs -----------------------------------------------------------------------------------

  // Bytes of a slab that comes for the next plan, where its optimizer state is then.
  double join(int64_t slab) {
    if (p_.offloaded[slab] & 2) swapped_[slab] = 1;
    has_[slab] = 1;
    return slab_[slab] = p_.joined[slab];
  }

  // Room for another part; where the whole state is here, only at the update.
  void recut(int64_t device, int64_t slab) {
    const int64_t end = p_.recut_offset[device + 1];
    int64_t row = p_.recut_offset[device];
    while (row < end && p_.recut_slab[row] != slab) ++row;
    if (row == end) return;
    const double early = p_.recut[3 * row], more = p_.recut[3 * row + 1];
    const double after = p_.recut[3 * row + 2];
    const double now = slab_[slab];
    take(early);
    if (has_[slab]) cut_[slab] = {true, more, after - early - now};
    has_[slab] = 1;
    slab_[slab] = after;
  }

  // Both peaks, when the steps from `first` on are all that is left.
  void finish(size_t first, double* peaks) {
    std::vector<double> coming;  // windows of the offloaded states, in the order of the updates
    for (int64_t slab = 0; slab < p_.slabs; ++slab) {
      if (cut_[slab].is) swapped_[slab] = 0;
    }
    for (size_t i = first; i < steps_.size(); ++i) {
      if (steps_[i].op == kUpdateOrSkip && swapped_[steps_[i].slab()]) {
        coming.push_back(p_.swap[steps_[i].slab()]);
      }
    }
    // States from the host: one goes when the next comes, the last ones when all must be back.
    size_t begin = 0, end = std::min<size_t>(p_.window, coming.size());
    const auto window = [&] {
      double sum = 0.0;
      for (size_t i = begin; i < end; ++i) sum += coming[i];
      return sum;
    };
    peaks[0] = std::max(peak_, used_ + window());
    double used = used_, peak = used;
    for (size_t i = first; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      const int64_t slab = step.slab();
      if (step.op == kSendState || step.op == kDrop) begin = end;
      peak = std::max(peak, used + window());
      if (step.op == kUpdateOrSkip && cut_[slab].is) {
        peak = std::max(peak, used + cut_[slab].more + window());
        used += cut_[slab].change;
        cut_[slab].is = false;
      } else if (step.op == kUpdateOrSkip && swapped_[slab] && end < coming.size()) {
        ++begin, ++end;
      } else if (step.op == kRecvState) {
        used += join(slab);
      } else if (step.op == kDrop && has_[slab]) {
        used -= slab_[slab];
        has_[slab] = 0;
      }
    }
    peaks[1] = std::max(peak, used + window());
  }

  const mflex_footprint_problem& p_;
  std::vector<Step> steps_;
  double used_ = 0.0, peak_ = 0.0, leaving_ = 0.0;
  std::vector<double> sent_;  // bytes of each message
  int64_t gone_ = 0;          // those that were taken
  std::vector<double> slab_;
  std::vector<char> has_, swapped_;  // slabs that are here; whose state is on the host
  std::vector<Cut> cut_;
  std::vector<double> context_;
  std::vector<char> has_context_;
  std::vector<int64_t> left_;  // operations to come of each micro-batch
  int64_t device_ = 0;
  std::vector<double> expected_;  // bytes of the buffers of the messages to come
  size_t next_expected_ = 0, computed_ = 0;
  int64_t posted_ = 0;
  bool evaluates_ = true, any_goes_ = false;
  std::vector<int64_t> began_;    // [stages, batches], number of the forward
  std::vector<char> goes_;        // [stages, batches], its activations travel
  std::vector<int64_t> returns_;  // of each operation: what begins to return with it; -1
  std::vector<Chain> chains_;
};

}  // namespace
}  // namespace mflex

// Both peaks of the devices [first, last).
MFLEX_API void mflex_program_footprint(const mflex_footprint_problem* problem, int64_t first,
                                       int64_t last) {
  mflex::Replay replay(*problem);
  for (int64_t device = first; device < last; ++device) {
    replay.run(device, problem->peak + 2 * device);
  }
}
