// Check a program before anything runs: replay all instruction lists together.
//
// The replay blocks where a worker may block: a receive waits for its message (sends are buffered,
// first in first out for each ordered pair of devices), an operation until messages are taken that
// its device has sent, a reduction for its whole group, the global norm for all devices. A message
// can be taken when its receive is posted, some ahead of the one that is waited for. It tracks what
// every device has computed and received, so whatever would make the iteration hang or its result
// wrong is refused with the device and the step.
//
// What it knows comes from plans, routing and words, and not from what programs are written from.
// tests/oracles/validate.py is the same in Python; the tests ask for the same verdicts and words.
#include "program_validate.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "api.h"
#include "program.h"
#include "program_messages.h"
#include "program_switch.h"

namespace mflex {
namespace {

// What a (stage, micro-batch) has gone through.
enum State : char { kNothing, kForwarded, kHalf, kDone };

class Replay {
 public:
  Replay(const mflex_validate_problem& p, Failure* fail)
      : p_(p),
        fail_(*fail),
        holders_{p.stage_offset, p.holder},
        unit_slabs_{p.slab_offset, p.slab},
        users_{p.user_offset, p.user},
        groups_{p.group_offset, p.group},
        switch_(p, fail),
        route_(p.route, p.route + p.stages * p.batches),
        state_(p.stages * p.batches, kNothing),
        activation_(p.stages * p.batches),
        gradient_(p.stages * p.batches),
        sent_activation_(p.stages * p.batches),
        sent_gradient_(p.stages * p.batches),
        weights_left_(p.devices * p.stages),
        messages_(p.devices),
        waits_for_(p.devices, -1),
        untaken_(p.devices),
        arrived_(p.devices * p.slabs),
        num_arrived_(p.slabs),
        reduced_(p.devices * p.slabs),
        updated_(p.devices * p.slabs),
        normed_(p.slabs),
        at_norm_(p.devices),
        past_norm_(p.devices),
        steps_(p.devices) {
    for (int64_t s = 0; s < p.stages; ++s) {
      for (int64_t m = 0; m < p.batches; ++m) ++weights_left_[route(s, m) * p.stages + s];
    }
    for (int64_t d = 0; d < p.devices; ++d) {
      lists_.emplace_back(p.words + p.word_offset[d], p.words + p.word_offset[d + 1]);
      ready_.push_back(p.devices - 1 - d);
    }
    posts_ = lists_;
    for (int64_t d = 0; d < p.devices; ++d) {
      for (int64_t i = 0; i < p.posted; ++i) post(d);
    }
  }

  void run() {
    while (!ready_.empty()) {
      device_ = fail_.device = ready_.back();
      ready_.pop_back();
      Reader& list = lists_[device_];
      while (!list.done()) {
        fail_.step = steps_[device_];
        const Step step = list.look();
        if (step.op >= kOps) stop("no device knows this instruction in a training program");
        if (past_norm_[device_] && !may_follow_norm(step.op)) {
          stop("only updates and a switch may follow the global norm");
        }
        if (!handle(step)) break;
        list.next();
        ++steps_[device_];
      }
    }
    finish();
  }

  const std::vector<int64_t>& steps() const { return steps_; }

 private:
  [[noreturn]] void stop(std::string reason) { fail_.stop(std::move(reason)); }

  int64_t route(int64_t stage, int64_t batch) const { return route_[stage * p_.batches + batch]; }

  static bool may_follow_norm(int64_t op) { return op >= kSquaredNorm && op != kGlobalNorm; }

  bool handle(const Step& step) {
    if (is_compute(step.op)) {
      untaken_[device_] = messages_.untaken(device_, step.under_way());
      if (untaken_[device_]) return false;
    }
    switch (step.op) {
      case kForward:
        return forward(step);
      case kBackward:
      case kBackwardInput:
        return backward(step);
      case kBackwardWeight:
        return backward_weight(step);
      case kSendActivation:
      case kSendGradient:
        return send(step);
      case kRecvActivation:
      case kRecvGradient:
        return receive(step);
      case kReduceGradient:
      case kScatterGradient:
        return reduce(step);
      case kSquaredNorm:
        return squared_norm(step.slab());
      case kGlobalNorm:
        return global_norm();
      case kUpdateOrSkip:
        return update(step.slab());
      case kGatherParameters:
        held(step.slab());
        if (step.group() >= p_.groups) stop("there are only groups 0 to " + str(p_.groups - 1));
        switch_.gather(device_, step);
        return true;
      case kRecut:
        if (past_norm_[device_]) stop("a slab is cut anew after the global norm");
        switch_.recut(device_, step);
        return true;
      case kSendState:
      case kSendPiece:
        check_peer(step);
        wake(switch_.send(device_, step));
        return true;
      case kRecvState:
      case kRecvPiece:
        check_peer(step);
        wake(switch_.receive(device_, step, past_norm_[device_]));
        return true;
      default:
        return drop(step.slab());
    }
  }

  // ---- computing -------------------------------------------------------------------------------

  int64_t index(const Step& step) {
    if (step.stage() >= p_.stages || step.batch() >= p_.batches) {
      stop("there are only stages 0 to " + str(p_.stages - 1) + ", micro-batches 0 to " +
           str(p_.batches - 1));
    }
    return step.stage() * p_.batches + step.batch();
  }

  // Index of an operation that must belong on this device.
  int64_t here(const Step& step) {
    const int64_t at = index(step), owner = route(step.stage(), step.batch());
    if (owner != device_) {
      const auto first = holders_.begin(step.stage()), last = holders_.end(step.stage());
      if (std::find(first, last, device_) == last) {
        stop("device " + str(device_) + " does not hold stage " + str(step.stage()));
      }
      stop("micro-batch " + str(step.batch()) + " is routed to device " + str(owner) +
           " for stage " + str(step.stage()));
    }
    return at;
  }

  bool forward(const Step& step) {
    const int64_t at = here(step), stage = step.stage(), batch = step.batch();
    if (!present(stage)) return false;
    if (state_[at] != kNothing) {
      stop("a second forward of micro-batch " + str(batch) + " on stage " + str(stage));
    }
    if (stage && !activation_[at]) {
      stop("the output of stage " + str(stage - 1) + " for micro-batch " + str(batch) +
           " is not on device " + str(device_) + " yet");
    }
    const int64_t before = p_.before[batch];
    if (before >= 0 && state_[stage * p_.batches + before] == kNothing) {
      stop("micro-batch " + str(batch) + " needs the keys and values of " + str(before) +
           ", the slice before it, which has not been forwarded");
    }
    state_[at] = kForwarded;
    if (stage + 1 < p_.stages && route(stage + 1, batch) == device_)
      activation_[at + p_.batches] = 1;
    return true;
  }

  bool present(int64_t stage) {
    for (int64_t unit = p_.unit[stage]; unit < p_.unit[stage + 1]; ++unit) {
      for (auto slab = unit_slabs_.begin(unit); slab != unit_slabs_.end(unit); ++slab) {
        if (!switch_.here(device_, *slab)) return false;
      }
    }
    return true;
  }

  bool backward(const Step& step) {
    const int64_t at = here(step), stage = step.stage(), batch = step.batch();
    if (!p_.train) stop("a backward in a program that is forward only");
    if (state_[at] == kNothing) stop("backward before forward");
    if (state_[at] != kForwarded) {
      stop("a second backward of micro-batch " + str(batch) + " on stage " + str(stage));
    }
    if (stage + 1 < p_.stages && !gradient_[at]) {
      stop("the gradient from stage " + str(stage + 1) + " for micro-batch " + str(batch) +
           " is not on device " + str(device_) + " yet");
    }
    const int64_t after = p_.after[batch];
    if (after >= 0 && state_[stage * p_.batches + after] < kHalf) {
      stop("the gradient of keys and values of micro-batch " + str(batch) +
           " is not whole: the backward of " + str(after) + ", the slice after it, is not done");
    }
    if (step.op == kBackward) {
      state_[at] = kDone;
      --weights_left_[device_ * p_.stages + stage];
    } else {
      state_[at] = kHalf;
    }
    if (stage && route(stage - 1, batch) == device_) gradient_[at - p_.batches] = 1;
    return true;
  }

  bool backward_weight(const Step& step) {
    const int64_t at = here(step);
    if (state_[at] != kHalf) {
      stop("the weight half of a backward must come once, after its input half");
    }
    state_[at] = kDone;
    --weights_left_[device_ * p_.stages + step.stage()];
    return true;
  }

  // ---- messages --------------------------------------------------------------------------------

  static bool forwards(int64_t op) { return op == kSendActivation || op == kRecvActivation; }

  // Producing and consuming device of a message, by the routing.
  Key ends(const Step& step) {
    const int64_t to = step.stage() + (forwards(step.op) ? 1 : -1);
    if (to < 0 || to >= p_.stages) {
      stop("no stage takes what stage " + str(step.stage()) + " sends this way");
    }
    const Key found{route(step.stage(), step.batch()), route(to, step.batch())};
    const bool sends = !is_receive(step.op);
    if ((sends ? found.first : found.second) != device_ ||
        (sends ? found.second : found.first) != step.peer()) {
      stop("this message goes from device " + str(found.first) + " to device " + str(found.second) +
           " by the routing");
    }
    if (found.first == found.second) stop("no message is needed on one device");
    return found;
  }

  // Tokens of the message that a word sends or receives.
  int64_t size(const uint64_t* word) const {
    return p_.sizes ? p_.sizes[word - p_.words] : p_.tokens[*word >> 44];
  }

  bool send(const Step& step) {
    const int64_t at = index(step);
    const auto [source, target] = ends(step);
    char& sent = (step.op == kSendActivation ? sent_activation_ : sent_gradient_)[at];
    if (sent) stop("sent a second time, first at step " + str(first_of(step)));
    if (state_[at] < (step.op == kSendActivation ? kForwarded : kHalf)) {
      stop("sent before it is computed");
    }
    const uint64_t* word = lists_[device_].at();
    const int64_t tokens = size(word);
    if (tokens != p_.tokens[step.batch()]) {
      stop("the message has " + str(tokens) + " tokens, micro-batch " + str(step.batch()) +
           " has " + str(p_.tokens[step.batch()]));
    }
    sent = 1;
    messages_.push(source, target, word, steps_[device_]);
    if (waits_for_[target] == source) {
      waits_for_[target] = -1;
      ready_.push_back(target);
    }
    return true;
  }

  // The next receive of a device's list is posted.
  void post(int64_t device) {
    Reader& list = posts_[device];
    while (!list.done()) {
      const Step step = list.take();
      if (!is_receive(step.op)) continue;
      if (step.peer() >= p_.devices) return;  // refused when it is waited for
      messages_.post(step.peer(), device);
      if (untaken_[step.peer()] && untaken_[step.peer()]->target == device) {
        ready_.push_back(step.peer());
      }
      return;
    }
  }

  // The number of the first step of this device that sends the same.
  int64_t first_of(const Step& step) const {
    Reader list(p_.words + p_.word_offset[device_], p_.words + p_.word_offset[device_ + 1]);
    for (int64_t number = 0;; ++number) {
      if (list.take().same(step)) return number;
    }
  }

  bool receive(const Step& step) {
    const int64_t at = index(step);
    const auto [source, target] = ends(step);
    Messages::Message found;
    if (!messages_.pop(source, target, &found)) {
      waits_for_[target] = source;
      return false;
    }
    post(device_);
    const Step message = Reader(found.word, found.word + 1).look();
    const int64_t wanted = step.op == kRecvActivation ? kSendActivation : kSendGradient;
    if (message.op != wanted || message.stage() != step.stage() ||
        message.batch() != step.batch()) {
      stop("out of order: the next message from device " + str(source) + " is its step " +
           str(found.number) + ", {" + str(source) + "." + str(found.number) + "}");
    }
    const int64_t tokens = size(lists_[device_].at()), given = size(found.word);
    if (given != tokens) {
      stop(std::string("the receive is ") + (tokens < given ? "smaller" : "larger") +
           " than the message: " + str(tokens) + " tokens against " + str(given) + " (device " +
           str(source) + ", step " + str(found.number) + ")");
    }
    if (wanted == kSendActivation) {
      activation_[at + p_.batches] = 1;
    } else {
      gradient_[at - p_.batches] = 1;
    }
    return true;
  }

  // ---- slabs -----------------------------------------------------------------------------------

  char& of(std::vector<char>& table, int64_t slab) { return table[device_ * p_.slabs + slab]; }

  // Holders of a slab that this device must hold.
  const std::vector<int64_t>& held(int64_t slab) {
    if (!p_.train) stop("work on gradients in a program that is forward only");
    if (slab >= p_.slabs) stop("there are only slabs 0 to " + str(p_.slabs - 1));
    if (!switch_.is_member(slab, device_)) {
      stop("device " + str(device_) + " does not hold slab " + str(slab));
    }
    return switch_.members(slab);
  }

  // All that is routed here must have given its gradient.
  void whole(int64_t slab) {
    for (auto stage = users_.begin(slab); stage != users_.end(slab); ++stage) {
      if (!weights_left_[device_ * p_.stages + *stage]) continue;
      int64_t batch = 0;
      while (route(*stage, batch) != device_ || state_[*stage * p_.batches + batch] == kDone) {
        ++batch;
      }
      stop("the gradient of slab " + str(slab) + " is not whole: the backward of micro-batch " +
           str(batch) + " on stage " + str(*stage) + " is not done");
    }
  }

  bool reduce(const Step& step) {
    const int64_t slab = step.slab();
    const auto& holders = held(slab);
    const int64_t count = static_cast<int64_t>(holders.size());
    if (of(arrived_, slab)) {
      if (of(reduced_, slab)) stop("slab " + str(slab) + " is reduced a second time");
      if (num_arrived_[slab] < count) return false;
      of(reduced_, slab) = 1;
      return true;
    }
    if (step.group() >= p_.groups) stop("there are only groups 0 to " + str(p_.groups - 1));
    const auto first = groups_.begin(step.group()), last = groups_.end(step.group());
    if (!std::equal(holders.begin(), holders.end(), first, last)) {
      stop("wrong group: slab " + str(slab) + " is held by devices " + names(holders));
    }
    if (count < 2) stop("slab " + str(slab) + " has one holder, nothing to reduce");
    if ((step.op == kScatterGradient) != switch_.scattered(slab)) {
      stop("each holder of slab " + str(slab) + " needs the sum of " +
           (switch_.scattered(slab) ? "only its own part" : "all of it"));
    }
    whole(slab);
    of(arrived_, slab) = 1;
    if (++num_arrived_[slab] < count) return false;
    for (const int64_t d : holders) {
      if (d != device_) ready_.push_back(d);
    }
    of(reduced_, slab) = 1;
    return true;
  }

  bool squared_norm(int64_t slab) {
    if (past_norm_[device_]) stop("a norm after the global norm");
    final(slab);
    auto& counted = normed_[slab];
    const bool again = std::find(counted.begin(), counted.end(), device_) != counted.end();
    if (again || (!counted.empty() && !switch_.scattered(slab))) {
      stop("the norm of slab " + str(slab) + " is counted twice, first by device " +
           str(*std::min_element(counted.begin(), counted.end())));
    }
    counted.push_back(device_);
    return true;
  }

  // This device must have the gradient of the whole global batch.
  void final(int64_t slab) {
    const auto& holders = held(slab);
    if (holders.size() > 1 && !of(reduced_, slab)) {
      stop("the gradient of slab " + str(slab) + " is not reduced over devices " + names(holders));
    }
    whole(slab);
  }

  bool global_norm() {
    if (!at_norm_[device_]) {
      complete();
      at_norm_[device_] = 1;
      if (++num_at_norm_ == p_.devices) {
        if (p_.train) all_normed();
        for (int64_t d = 0; d < p_.devices; ++d) {
          if (d != device_) ready_.push_back(d);
        }
      }
    }
    if (num_at_norm_ < p_.devices) return false;
    past_norm_[device_] = 1;
    return true;
  }

  void all_normed() {
    for (int64_t slab = 0; slab < p_.slabs; ++slab) {
      const auto& counted = normed_[slab];
      if (counted.empty()) stop("no device has counted the norm of slab " + str(slab));
      const auto& holders = switch_.members(slab);
      if (!switch_.scattered(slab) || counted.size() >= holders.size()) continue;
      std::vector<int64_t> rest;
      for (const int64_t d : holders) {
        if (std::find(counted.begin(), counted.end(), d) == counted.end()) rest.push_back(d);
      }
      stop("devices " + names(rest) + " have not counted the norm of their parts of slab " +
           str(slab));
    }
  }

  // All that is routed to this device must be done before the global norm.
  void complete() {
    for (int64_t stage = 0; stage < p_.stages; ++stage) {
      const auto first = holders_.begin(stage), last = holders_.end(stage);
      if (std::find(first, last, device_) == last) continue;
      for (int64_t batch = 0; batch < p_.batches; ++batch) {
        if (route(stage, batch) != device_) continue;
        const State state = state_[stage * p_.batches + batch];
        const std::string name =
            "of micro-batch " + str(batch) + " on stage " + str(stage) + " is missing";
        if (state == kNothing) stop("the forward " + name);
        if (p_.train && state != kDone) {
          stop(std::string("the ") + (state == kHalf ? "weight half of the " : "") + "backward " +
               name);
        }
      }
    }
    for (int64_t slab = 0; slab < p_.slabs && p_.train; ++slab) {
      if (switch_.is_member(slab, device_)) final(slab);
    }
  }

  bool update(int64_t slab) {
    held(slab);
    if (!past_norm_[device_]) stop("an update before the global norm");
    if (of(updated_, slab)) stop("slab " + str(slab) + " is updated a second time");
    if (!switch_.update(device_, slab)) return false;
    of(updated_, slab) = 1;
    return true;
  }

  // ---- a switch --------------------------------------------------------------------------------

  void check_peer(const Step& step) {
    if (step.peer() >= p_.devices || step.peer() == device_) {
      stop("a state goes to another of the " + str(p_.devices) + " devices");
    }
  }

  void wake(int64_t device) {
    if (device >= 0) ready_.push_back(device);
  }

  bool drop(int64_t slab) {
    if (!past_norm_[device_]) stop("a slab is dropped before the global norm");
    final(slab);
    return switch_.drop(device_, slab);
  }

  // ---- the end ---------------------------------------------------------------------------------

  // Every list must have come to its end, with all updates. No message can be left over here: a
  // send is refused unless one operation needs it, and that is refused without its receive.
  void finish() {
    std::vector<int64_t> blocked;
    for (int64_t d = 0; d < p_.devices; ++d) {
      if (!lists_[d].done()) {
        blocked.push_back(d);
      } else if (!past_norm_[d]) {
        fail_.stop_at_end(d, "the list ends without a global norm");
      }
    }
    if (!blocked.empty()) deadlock(blocked);
    if (p_.train) switch_.finish();
  }

  // Whether a device still has a step for which `wanted` is true.
  template <class Wanted>
  bool ahead(int64_t device, Wanted wanted) const {
    Reader rest = lists_[device];
    while (!rest.done()) {
      if (wanted(rest.take())) return true;
    }
    return false;
  }

  // Name the device whose wait cannot end; if there is none, all wait for each other.
  [[noreturn]] void deadlock(const std::vector<int64_t>& blocked) {
    std::string reasons;
    int64_t culprit = -1;
    for (const int64_t device : blocked) {
      bool never = false;
      const std::string reason = blocks(device, &never);
      if (never && culprit < 0) culprit = device;
      const std::string step = str(steps_[device]);
      reasons += "\n  device " + str(device) + " at step " + step + " ({" + str(device) + "." +
                 step + "}) " + reason;
    }
    // The culprit is never one that waits at the barrier for the others.
    for (auto d = blocked.begin(); d != blocked.end() && culprit < 0; ++d) {
      if (!at_norm_[*d]) culprit = *d;
    }
    fail_.device = culprit < 0 ? blocked.front() : culprit;
    fail_.step = steps_[fail_.device];
    fail_.stop("deadlock:" + reasons, blocked);
  }

  // What a blocked device waits for, and whether that never comes.
  std::string blocks(int64_t device, bool* never) {
    const Step here = lists_[device].look();
    std::vector<int64_t> others;
    if (is_receive(here.op)) {
      const int64_t wanted = here.op == kRecvActivation ? kSendActivation : kSendGradient;
      *never = !ahead(here.peer(), [&](const Step& s) {
        return s.op == wanted && s.stage() == here.stage() && s.batch() == here.batch();
      });
      return "waits for device " + str(here.peer()) + (*never ? ", which never sends it" : "");
    }
    const auto same = [](const Step& step) {
      return [step](const Step& s) { return s.same(step); };
    };
    if (here.op == kReduceGradient || here.op == kScatterGradient) {
      for (auto d = groups_.begin(here.group()); d != groups_.end(here.group()); ++d) {
        if (!arrived_[*d * p_.slabs + here.slab()]) others.push_back(*d);
      }
      for (const int64_t d : others) *never |= !ahead(d, same(here));
      return "waits for devices " + names(others) + " at the reduction" +
             (*never ? ", which lack it" : "");
    }
    if (const Messages::Sent* sent = untaken_[device]; sent && is_compute(here.op)) {
      Reader list(p_.words + p_.word_offset[device], p_.words + p_.word_offset[device + 1]);
      for (int64_t i = 0; i < sent->number; ++i) list.next();
      const Step message = list.look();
      const int64_t wanted = message.op == kSendActivation ? kRecvActivation : kRecvGradient;
      *never = !ahead(sent->target, [&](const Step& s) {
        return s.op == wanted && s.stage() == message.stage() && s.batch() == message.batch();
      });
      return "waits for device " + str(sent->target) + " to take what it sent at step " +
             str(sent->number) + (*never ? ", which it never receives" : "");
    }
    if (here.op == kGlobalNorm) {
      for (int64_t d = 0; d < p_.devices; ++d) {
        if (!at_norm_[d]) others.push_back(d);
      }
      return "waits for devices " + names(others) + " at the global norm";
    }
    std::map<int64_t, Step> needed;
    const int64_t slab = switch_.waits(device, &needed);
    bool sends = false;
    for (const auto& [peer, step] : needed) {
      others.push_back(peer);
      *never |= !ahead(peer, same(step));
      sends |= step.op == kSendState || step.op == kSendPiece;
    }
    return "waits for devices " + names(others) + " to " + (sends ? "send" : "take") +
           " the state of slab " + str(slab) + (*never ? ", which never happens" : "");
  }

  const mflex_validate_problem& p_;
  Failure& fail_;
  Rows holders_, unit_slabs_, users_, groups_;
  SwitchReplay switch_;
  std::vector<int32_t> route_;  // small: it is asked all the time
  std::vector<State> state_;
  // Inputs at hand: the previous stage's output, the next stage's gradient.
  std::vector<char> activation_, gradient_;
  std::vector<char> sent_activation_, sent_gradient_;
  std::vector<int64_t> weights_left_;  // [devices, stages], gradients to come
  Messages messages_;
  std::vector<int64_t> waits_for_;              // sender that a receive waits for; -1
  std::vector<const Messages::Sent*> untaken_;  // message that an operation waits for; null
  std::vector<char> arrived_;                   // [devices, slabs], at the reduction
  std::vector<int64_t> num_arrived_;
  std::vector<char> reduced_, updated_;       // [devices, slabs]
  std::vector<std::vector<int64_t>> normed_;  // devices that have counted each norm
  std::vector<char> at_norm_, past_norm_;
  int64_t num_at_norm_ = 0;
  std::vector<int64_t> steps_;  // of each list that are done
  std::vector<Reader> lists_;
  std::vector<Reader> posts_;  // where each has posted receives
  std::vector<int64_t> ready_;
  int64_t device_ = 0;
};

}  // namespace
}  // namespace mflex

// 0: the program is right. 1: it is not, and `failure`, if it is not null, says where and why.
MFLEX_API int64_t mflex_program_validate(const mflex_validate_problem* problem,
                                         mflex_validate_failure* failure) {
  using namespace mflex;
  Failure fail;
  Replay replay(*problem, &fail);
  try {
    replay.run();
    return 0;
  } catch (const Failure::Stopped& stopped) {
    if (!failure) return 1;
    const auto& p = *problem;
    if (fail.step < 0) {
      Reader list(p.words + p.word_offset[fail.device], p.words + p.word_offset[fail.device + 1]);
      for (fail.step = 0; !list.done(); list.next()) ++fail.step;
    }
    failure->device = fail.device;
    failure->step = fail.step;
    std::copy(replay.steps().begin(), replay.steps().end(), failure->steps);
    std::copy(stopped.shown.begin(), stopped.shown.end(), failure->shown);
    failure->num_shown = static_cast<int64_t>(stopped.shown.size());
    const size_t length =
        std::min(stopped.reason.size(), static_cast<size_t>(failure->capacity - 1));
    std::memcpy(failure->reason, stopped.reason.data(), length);
    failure->reason[length] = '\0';
    return 1;
  }
}
