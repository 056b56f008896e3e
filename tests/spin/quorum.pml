/* The quorum's protocol for one name, exclusive mode, three nodes. Read it beside docs/internals/protocol.md;
 * docs/internals/model.md says what it covers, what it leaves out, and how far it is explored.
 *
 * A call of a script is one step, with one of these outcomes. All but the first spend one of FAULTS:
 *   answered | the answer is lost | the request is lost | the request is carried out late, its answer is not heard |
 *   the answer is heard late
 * Notices and hints travel apart from answers: each stays on its way for any time, and a later one replaces it.
 *
 * Time is an order of events. A node drops a record only after its client's deadline for that node (`live`) is over.
 * A request that is alive spends one of FAULTS when it lets a deadline pass; one that is gone does not.
 */
#define N 3
#define MAJORITY 2

/* The requests; a smaller number is an older ticket. */
#ifndef R
#define R 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
/* So often a client becomes unable to count votes: it distrusts nodes, or they are too far away. It may count again at any time. */
#ifndef BLINDS
#define BLINDS 0
#endif
/* The set of requests whose client can never count. */
#ifndef BLIND
#define BLIND 0
#endif
/* The set of requests whose body does not end: such a request leaves only when it has lost its lease. */
#ifndef STAYS
#define STAYS 0
#endif
/* The last token of each node when the model begins: its clock. A restarted node goes on with the clock. Clocks that agree
 * to within restart_delay are then past every token; with CLOCKS_DIFFER a node goes on with its own, and tokens may shrink. */
#define CLOCK(i) (10 * (i))

/* The set of requests that have the same owner=. */
#ifdef OWNED
#define OWNER(r) ((((OWNED) >> (r)) & 1) -> R : (r))
#else
#define OWNER(r) (r)
#define OWNED 0
#endif

/* What a node has of a request, and what its client knows of it; then the calls. (Spin numbers them from the end: QUEUED
 * is 1.) The node alone knows P (the client hears V), FRONT (stage h, a place in front: the client hears QUEUED), RESTING
 * (stage w, a place that gets no vote: the client hears QUEUED) and LEFT (a marker: a late duplicate is refused). */
#define NONE 0
mtype = { REST, WAITS, ENDED, YIELD, HELD, WRITE, ASK, RESTING, FRONT, LEFT, A, C, P, V, QUEUED };

/* What a request is at. */
#define WAIT 0
#define FENCE 1
#define HOLD 2
#define LEAVE 3
#define OVER 4

typedef Node {
  bool up, believed;
  bool blank;                 /* it has no last token: its clock decides */
  byte last;                  /* the last token that it gave or took */
  byte stage[R];
  byte token[R];
};
Node node[N];

typedef Ballot {              /* what a client knows of its request at one node */
  byte stage, token;
  bool given_back;            /* the vote with this token was yielded: it does not count any more */
  bool live;                  /* the deadline that the node acknowledged is not over */
  bool noticed;               /* the vote is known by a notice, not by an answer */
  bool old;                   /* the node restarted, and the client has not met it since */
  bool healing;
  bool yielding;              /* a yield has to be sent */
  byte notice;                /* on its way: the token of a vote */
};
typedef Request {
  byte phase;
  bool blind;                 /* WAIT, FENCE: its client cannot count votes now */
  bool joins;                 /* FENCE: its owner holds already, by a majority: its token is said by HELD */
  byte token;                 /* FENCE, HOLD: its token; LEAVE: the one for the next vote */
  byte highest;               /* the largest token that a node told it */
  byte tried;                 /* WAIT, FENCE: the largest token that it has written */
  byte renounced;             /* WAIT, FENCE: the largest one that a question has named: it is not written any more */
  byte round;                 /* nodes: FENCE, LEAVE: not answered yet; HOLD: answered in this round */
  byte lease;                 /* HOLD: the nodes whose deadlines the lease rests on; else those ever asked */
  byte before;                /* those of them that restarted since */
  Ballot at[N];
};
Request request[R];

typedef Call { byte call, who, where, with, known };
Call late;                    /* a request that is carried out some time */
typedef Answer { byte call, who, where, stage, token, floor; bool back, live };
Answer slow;                  /* an answer that is heard some time */

byte greatest;                /* the largest token that anybody has held with */
byte faults = FAULTS, restarts = RESTARTS, deaths = DEATHS, crashes = CRASHES, blinds = BLINDS;

/* With PATIENCE nodes die only when a request that stays has held for so many turns. In a turn, each connection that has
 * something to say has said something. */
#ifdef PATIENCE
byte turns, said;
#define said_by(r, i)      ((said) >> (N * (r) + (i)) & 1)
#define silent(r, i)       (said_by(r, i) || !node[i].up || says(r, i) == NONE)
#define all_said(r)        (silent(r, 0) && silent(r, 1) && silent(r, 2))
#define may_die            (turns == PATIENCE)
#define stays_in           ((has(STAYS, 0) && request[0].phase == HOLD) || (has(STAYS, 1) && request[1].phase == HOLD))
#else
#define may_die            true
#endif

#ifdef GIVE_ON
byte gives = GIVE_ON;
#endif

hidden byte what, with_token, with_known, o, k, j, q, hold;                       /* scratch of the scripts */
hidden byte a_stage, a_token, a_floor, a_back, a_live, any, live;        /* the answer of the script that ran last */

#define has(set, i)   (((set) >> (i)) & 1)
#define bit_of(i)     (1 << (i))
#define size(set)     (has(set, 0) + has(set, 1) + has(set, 2))
#define voting(s)     ((s) >= V && (s) <= A)
#define open(s)       ((s) == V || (s) == P)
#define at_node       node[i].stage[r]
#define its_token     node[i].token[r]
#define ballot        request[r].at[i]

/* ---- What a node does (vote.lua, unvote.lua, tickets.lua) --------------------------------------------------- */

inline find_oldest(i) {       /* o: the oldest waiter, those in front before all others; or R */
  o = 0;
#ifdef WRONG_ORDER
  do
  :: o < R && node[i].stage[o] != FRONT && node[i].stage[o] != QUEUED -> o++
  :: else -> break
  od
#else
  do
  :: o < R && node[i].stage[o] != FRONT -> o++
  :: else -> break
  od;
  if
  :: o == R ->
     o = 0;
     do
     :: o < R && node[i].stage[o] != QUEUED -> o++
     :: else -> break
     od
  :: else
  fi
#endif
}

/* After find_oldest. A vote is asked back for an older request, and for one that holds elsewhere. */
#define in_the_way(i, r)  (o < R && (o < (r) || node[i].stage[o] == FRONT))

#ifdef OLD_OWNER
#define holding(s)    ((s) == C || (s) == A)
#else
#define holding(s)    ((s) == C)
#endif
inline confirmed_hold(i, owned) {   /* hold: the token that the owner of `owned` holds with here, or 0 */
  hold = 0;
  for (k : 0 .. R - 1) {
    if
    :: OWNER(k) == OWNER(owned) && holding(node[i].stage[k]) && hold == 0 ->
       hold = node[i].token[k]
    :: else
    fi
  }
}

inline fresh(i, who) {
  node[i].last++;
  node[i].blank = 0;
  assert(node[i].last < 250);          /* else requests take turns for ever: a livelock */
  node[i].token[who] = node[i].last;
  node[i].stage[who] = V
}

inline open_again(i) {        /* an `a` vote whose owner does not hold here any more may be asked back */
#ifdef OLD_OWNER
  skip
#else
  for (j : 0 .. R - 1) {
    if
    :: node[i].stage[j] == A -> confirmed_hold(i, j)
    :: else -> hold = 1
    fi;
    if
    :: !hold -> fresh(i, j)
    :: else
    fi
  }
#endif
}

inline vote_for_oldest(i, wanted, silent_for) {
  open_again(i);
  do
  :: find_oldest(i);
     any = false;
     for (k : 0 .. R - 1) { any = any || voting(node[i].stage[k]) }
     hold = 0;
     if
     :: o < R -> confirmed_hold(i, o)
     :: else
     fi;
     if
     :: o == R || (any && hold == 0) -> break
     :: else ->
        if
        :: hold -> node[i].token[o] = hold; node[i].stage[o] = A
        :: !hold && wanted > node[i].last && !node[i].blank ->
           node[i].last = wanted; node[i].token[o] = wanted; node[i].stage[o] = P
        :: else -> fresh(i, o)
        fi;
        if
        :: o != silent_for && !request[o].at[i].old -> request[o].at[i].notice = node[i].token[o]
        :: else
        fi
     fi
  od
}

inline answer(i, r) {         /* after find_oldest */
  a_token = its_token;
  a_floor = node[i].last;
  a_live = 1;
  a_back = 0;
  if
  :: at_node == QUEUED -> a_stage = QUEUED
  :: at_node == FRONT || at_node == RESTING -> a_stage = QUEUED
  :: open(at_node) -> a_stage = V; a_back = in_the_way(i, r)
  :: at_node == C || at_node == A -> a_stage = at_node
  :: else -> a_stage = NONE            /* gone */
  fi
}

inline take_token(i, t) {
  node[i].blank = 0;
  if
  :: t > node[i].last -> node[i].last = t
  :: else
  fi
}

/* No vote: it queues, in front if it holds elsewhere, or its owner is in already. */
#ifdef OLD_HELD
#define place(what)   QUEUED
#else
#define place(what)   (what == HELD -> FRONT : QUEUED)
#endif
inline stand_or_join(i, r, what) {
  confirmed_hold(i, r);
  if
  :: hold -> at_node = A; its_token = hold
  :: else -> at_node = place(what); its_token = 0
  fi
}

inline carry_out(what, r, i, t, by) {      /* by: the token by which the client of HELD knows the vote */
  find_oldest(i);
  if
  :: at_node == LEFT && what != ENDED -> a_stage = NONE

  :: at_node != LEFT && (what == ASK || what == HELD) ->
     if
     :: voting(at_node) && what == HELD && (at_node == C || its_token == by) ->
        its_token = t; at_node = C; take_token(i, t)
     :: at_node == C && what == ASK && t >= its_token ->
        at_node = V                    /* its client could not confirm it by a majority */
     :: at_node == NONE || at_node == QUEUED || at_node == FRONT || at_node == RESTING -> stand_or_join(i, r, what)
     :: else
     fi;
     vote_for_oldest(i, 0, r);
     answer(i, r)

  :: at_node != LEFT && what == WAITS ->
     if
     :: at_node == C && t >= its_token -> at_node = V
     :: at_node == NONE || at_node == QUEUED || at_node == FRONT || at_node == RESTING ->
        at_node = RESTING; its_token = 0
     :: else                           /* a vote stays, until it is given back by its token */
     fi;
     vote_for_oldest(i, 0, r);
     answer(i, r)

  :: at_node != LEFT && what == REST ->
     if
     :: open(at_node) && its_token == t ->
        at_node = RESTING; its_token = 0;
        vote_for_oldest(i, 0, r)
     :: else
     fi;
     answer(i, r)

  :: at_node != LEFT && what == WRITE ->
     if
     :: voting(at_node) && t >= its_token -> its_token = t; at_node = C; take_token(i, t)
     :: else
     fi;
     answer(i, r);
     if
     :: !voting(at_node) -> a_stage = NONE
     :: else
     fi

  :: at_node != LEFT && what == YIELD ->
     if
     :: open(at_node) && its_token == t && !in_the_way(i, r) -> fresh(i, r)  /* nobody older waits any more */
     :: open(at_node) && its_token == t && in_the_way(i, r) ->
        at_node = QUEUED; its_token = 0;
        vote_for_oldest(i, 0, r)
     :: else
     fi;
     answer(i, r)

  :: what == ENDED ->
     at_node = LEFT; its_token = 0;
     vote_for_oldest(i, t, R)
  fi
}

/* ---- What a client knows (votes.py) -------------------------------------------------------------------------- */

#define counts(r, i) (voting(request[r].at[i].stage) && !request[r].at[i].given_back \
  && request[r].at[i].live && (node[i].believed || request[r].at[i].old))
#define voted(r) (!request[r].blind && counts(r, 0) + counts(r, 1) + counts(r, 2) >= MAJORITY)
#define same(r, i, j) (request[r].at[i].token > request[r].renounced && counts(r, i) && counts(r, j) && request[r].at[i].stage != A && request[r].at[j].stage != A \
  && request[r].at[i].token == request[r].at[j].token)
#define joined(r, i, j) (counts(r, i) && counts(r, j) && request[r].at[i].stage == A && request[r].at[j].stage == A \
  && request[r].at[i].token == request[r].at[j].token)
#define confirmed(r, i) (counts(r, i) && request[r].at[i].stage == C && request[r].at[i].token == request[r].token)
#define confirmations(r) (confirmed(r, 0) + confirmed(r, 1) + confirmed(r, 2))

inline hear_token(r, t) {
  if
  :: t > request[r].highest -> request[r].highest = t
  :: else
  fi
}

inline forget_ballots(r) {
  for (j : 0 .. N - 1) {
    request[r].at[j].stage = 0; request[r].at[j].token = 0; request[r].at[j].given_back = 0;
    request[r].at[j].live = 0; request[r].at[j].noticed = 0; request[r].at[j].old = 0;
    request[r].at[j].healing = 0; request[r].at[j].yielding = 0;
    request[r].at[j].notice = 0
  };
  j = 0
}

inline leave(r) {             /* from here on nothing is believed; each node that was asked has to hear of it */
  request[r].round = (request[r].phase == HOLD -> 7 : request[r].lease);
  request[r].phase = LEAVE; request[r].blind = 0;
  request[r].token = (request[r].highest -> request[r].highest + 1 : 0);
  request[r].highest = 0; request[r].tried = 0; request[r].renounced = 0; request[r].joins = 0;
  request[r].lease = 0; request[r].before = 0;
  forget_ballots(r);
  printf("request %d leaves\n", r)
}

inline lose(r) {
#ifdef NEVER_LOST
  assert(!has(STAYS, r));              /* Safety 3: a node that dies ends no lease */
#endif
  leave(r)
}

inline over(r) {
  for (j : 0 .. N - 1) {      /* no message of it is on its way: nobody looks at its marker */
    if
    :: node[j].stage[r] == LEFT && !(late.call && late.who == r) -> node[j].stage[r] = NONE
    :: else
    fi
  };
  request[r].phase = OVER; request[r].blind = 0; request[r].token = 0; request[r].highest = 0; request[r].joins = 0;
  request[r].tried = 0; request[r].renounced = 0;
  request[r].round = 0; request[r].lease = 0; request[r].before = 0;
  forget_ballots(r)
}

inline enter(r, t) {          /* the body begins */
  for (k : 0 .. R - 1) {
    /* Safety 1: two that exclude each other never hold at once. */
    assert(k == r || request[k].phase != HOLD || OWNER(k) == OWNER(r))
  }
#ifndef CLOCKS_DIFFER
  /* Safety 2: tokens grow. (A second hold of an owner may have its first one's token.) */
  assert(t > greatest || (OWNED && t == greatest));
#endif
  if
  :: t > greatest -> greatest = t
  :: else
  fi;
  printf("request %d holds with %d\n", r, t);
  request[r].phase = HOLD; request[r].blind = 0; request[r].token = t; request[r].round = 0; request[r].joins = 0;
  request[r].tried = 0; request[r].renounced = 0
}

inline consider_giving_back(r, i) {
  if
  :: request[r].phase == WAIT && ballot.stage == V && !voted(r) ->
     ballot.given_back = 1; ballot.yielding = 1
  :: else
  fi
}

#ifdef OLD_COUNT
#define rests(r)   false
#else
#define rests(r)   request[r].blind
#endif

inline take(what, r, i) {     /* an answer: Ballot.take, and what follows from it */
#ifndef OLD_WAITING
  if
  :: ballot.old -> ballot.stage = NONE; ballot.token = 0; ballot.given_back = 0; ballot.notice = 0
  :: else
  fi;
#endif
  ballot.old = 0;
  if
  :: a_stage >= V ->
     ballot.given_back = ballot.given_back && ballot.token == a_token && a_stage != A;
     ballot.stage = a_stage; ballot.token = a_token; ballot.live = ballot.live || a_live; ballot.noticed = 0;
     hear_token(r, a_token)
  :: a_stage == QUEUED ->
     ballot.live = ballot.live || a_live;
     if
#ifdef OLD_WAITING
     :: ballot.token > a_floor         /* a notice has overtaken it */
#else
     :: ballot.token > a_floor && ballot.noticed
#endif
     :: else -> ballot.stage = QUEUED; ballot.token = 0; ballot.given_back = 0; ballot.noticed = 0
     fi
  :: else -> ballot.stage = NONE; ballot.token = 0; ballot.given_back = 0; ballot.live = 0; ballot.noticed = 0
  fi;
  if                                   /* a notice that is not larger is stale, also when it comes later */
  :: ballot.notice <= ballot.token || (a_stage == QUEUED && ballot.notice <= a_floor) -> ballot.notice = 0
  :: else
  fi;
  if
  :: request[r].phase == WAIT && a_stage == V && (a_back || rests(r)) -> consider_giving_back(r, i)
#ifndef OLD_YIELD
  :: request[r].phase == WAIT && a_stage == V && !a_back && ballot.given_back ->
     ballot.yielding = 1               /* the yield was lost */
#endif
  :: else
  fi;
  if
  :: (what == WRITE || what == HELD) && request[r].phase == FENCE ->
     request[r].round = request[r].round & ~bit_of(i);
     if
     :: confirmations(r) >= MAJORITY -> rest_on_confirmed(r); q = request[r].token; enter(r, q)
     :: else
     fi
  :: what == HELD && request[r].phase == HOLD ->
     if
     :: has(request[r].round, i) -> request[r].round = 0    /* a new round */
     :: else
     fi;
     request[r].round = request[r].round | bit_of(i);
     if
     :: ballot.stage != C -> ballot.healing = 1
     :: else
     fi;
     kept(r);
     if
     :: q >= MAJORITY -> rest_on_confirmed(r); request[r].round = 0
     :: q + N - size(request[r].round) < MAJORITY -> lose(r)      /* the nodes say so */
     :: else
     fi
  :: else
  fi
}

inline kept(r) {              /* q: the votes that this round has extended, and that were never interrupted */
  q = 0;
  for (j : 0 .. N - 1) {
    q = q + (confirmed(r, j) && has(request[r].round, j) && !request[r].at[j].healing)
  }
}

inline rest_on_confirmed(r) {
  request[r].lease = 0; request[r].before = 0;
  for (j : 0 .. N - 1) {
    if
    :: confirmed(r, j) ->
       request[r].lease = request[r].lease | bit_of(j);
       request[r].before = request[r].before | (request[r].at[j].old << j);
       request[r].at[j].healing = 0    /* the others alone suffice, so nobody was in between */
    :: else
    fi
  }
}

inline deadline_is_over(r, i) {   /* the local deadline is that of the last majority */
  ballot.live = 0;
  if
  :: request[r].phase == HOLD ->
     request[r].lease = request[r].lease & ~bit_of(i);
     request[r].before = request[r].before & ~bit_of(i);
     if
     :: size(request[r].lease) < MAJORITY -> lose(r)
     :: else
     fi
  :: else
  fi
}

inline forget_slow() {
  slow.call = 0; slow.who = 0; slow.where = 0; slow.stage = 0; slow.token = 0; slow.floor = 0; slow.back = 0;
  slow.live = 0
}

/* ---- One connection: what a request says to a node, and what the node says by itself --------------------------- */

#define heard_late(r, i) (slow.call && slow.who == r && slow.where == i)
#define can_call(r, i) (node[i].up && !heard_late(r, i) && next_call != NONE)
/* What waits for a majority of one round needs rounds: no node is asked again before the others have answered. */
#if defined(SECURE) || defined(PATIENCE)
#define unheard_of(r, i) (node[i].up && !has(request[r].round, i))
#define in_turn(r, i)    (has(request[r].round, i) && (unheard_of(r, 0) || unheard_of(r, 1) || unheard_of(r, 2)))
#else
#define in_turn(r, i)    false
#endif
#define next_call     says(r, i)
#define says(r, i) (request[r].at[i].yielding -> (rests(r) -> REST : YIELD) : \
  (request[r].phase == WAIT && !voted(r) -> (rests(r) -> WAITS : ASK) : \
  (request[r].phase == FENCE && has(request[r].round, i) -> (request[r].joins -> HELD : WRITE) : \
  (request[r].phase == HOLD && !in_turn(r, i) -> HELD : \
  (request[r].phase == LEAVE && has(request[r].round, i) -> ENDED : NONE)))))

inline unheard(what, r, i) {  /* the client learns nothing */
  if
  :: request[r].phase == FENCE && what != YIELD && what != REST && what != ASK && what != WAITS -> request[r].round = request[r].round & ~bit_of(i)
  :: else
  fi
}

inline send(r, i) {           /* what is sent, and its token */
  what = next_call;                    /* the lines printed are seen when Spin replays a counterexample */
  with_token = (what == YIELD || what == REST -> ballot.token :
    (what == ASK || what == WAITS -> request[r].tried : request[r].token));
  with_known = (what == HELD -> ballot.token : 0);
  if
  :: what == ASK || what == WAITS -> request[r].renounced = request[r].tried
  :: else
  fi;
  printf("request %d to node %d: %e %d\n", r, i, what, with_token);
  ballot.yielding = 0;
  if
  :: what == ASK || what == WAITS || what == WRITE -> request[r].lease = request[r].lease | bit_of(i)
  :: else
  fi
}

inline speak(r, i) {
#ifdef PATIENCE
  said = said | (1 << (N * r + i));
  if
  :: all_said(0) && all_said(1) ->
     said = 0;
     turns = (turns < PATIENCE && stays_in -> turns + 1 : turns)
  :: else
  fi
#else
  skip
#endif
}

proctype Link(byte r, i) {
  do
  :: d_step {                 /* answered */
       can_call(r, i) ->
       send(r, i);
       carry_out(what, r, i, with_token, with_known);
       if
       :: what != ENDED -> printf("    answer: %e %d, asked back: %d\n", a_stage, a_token, a_back)
       :: else
       fi;
       if
       :: what == ENDED -> request[r].round = request[r].round & ~bit_of(i)
       :: else -> take(what, r, i)
       fi;
       speak(r, i);
       with_token = 0
     }
  :: d_step {                 /* the answer is lost */
       faults && can_call(r, i) -> faults--;
       send(r, i);
       carry_out(what, r, i, with_token, with_known);
       printf("    the answer is lost\n");
       unheard(what, r, i);
       with_token = 0
     }
  :: d_step {                 /* the request is lost */
       faults && can_call(r, i) -> faults--;
       send(r, i);
       printf("    the request is lost\n");
       unheard(what, r, i);
       with_token = 0
     }
  :: d_step {                 /* the request is late */
       faults && late.call == NONE && can_call(r, i) -> faults--;
       send(r, i);
       printf("    it is late\n");
       late.call = what; late.who = r; late.where = i; late.with = with_token; late.known = with_known;
       unheard(what, r, i);
       with_token = 0
     }
  :: d_step {                 /* the answer is late */
       faults && slow.call == NONE && request[r].phase != LEAVE && can_call(r, i) -> faults--;
       send(r, i);
       carry_out(what, r, i, with_token, with_known);
       printf("    its answer is late\n");
       slow.call = what; slow.who = r; slow.where = i; slow.stage = a_stage; slow.token = a_token;
       slow.floor = a_floor; slow.back = a_back; slow.live = 1
     }
  :: d_step {                 /* a notice */
       ballot.notice ->
       with_token = ballot.notice;
       printf("node %d to request %d: a notice, %d\n", i, r, with_token);
       ballot.notice = 0;
       if
       :: request[r].phase < LEAVE ->
          hear_token(r, with_token);
          if
          :: (!voting(ballot.stage) || ballot.given_back) && with_token > ballot.token ->
             ballot.stage = V; ballot.token = with_token; ballot.given_back = 0; ballot.noticed = 1
          :: else
          fi;
          if
          :: request[r].phase == WAIT && !OWNED && (same(r, 0, 1) || same(r, 0, 2) || same(r, 1, 2)) ->
             request[r].lease = 0;
             q = (same(r, 0, 1) || same(r, 0, 2) -> request[r].at[0].token : request[r].at[1].token);
             for (j : 0 .. N - 1) {
               if
               :: counts(r, j) && request[r].at[j].token == q ->
                  request[r].lease = request[r].lease | bit_of(j);
                  request[r].before = request[r].before | (request[r].at[j].old << j)
               :: else
               fi
             };
             enter(r, q)
          :: else
          fi
       :: else
       fi;
       with_token = 0
     }
  :: d_step {                 /* an inquiry that comes late; one in time is part of the next answer */
       faults && request[r].phase == WAIT && ballot.stage == V && !ballot.given_back && !voted(r) ->
       faults--;
       printf("node %d to request %d: asks its vote back, late\n", i, r);
       consider_giving_back(r, i)
     }
  :: d_step {                 /* the client was silent for too long */
       (faults || !node[i].up) && ballot.live ->
       faults = (node[i].up -> faults - 1 : faults);
       printf("request %d, node %d: the deadline is over\n", r, i);
       deadline_is_over(r, i)
     }
  :: d_step {                 /* then, or when the client has gone, the node may drop it */
       node[i].up && !ballot.live && request[r].phase != LEAVE && at_node != NONE && at_node != LEFT ->
       at_node = NONE; its_token = 0;
       slow.live = slow.live && !heard_late(r, i);
       printf("node %d drops request %d\n", i, r)
     }
#ifdef GIVE_ON
  :: d_step {                 /* a vote that was not confirmed in time is given on: its request rests until it asks again */
       gives && node[i].up && at_node == V && request[r].phase <= HOLD -> gives--;
       at_node = RESTING; its_token = 0;
       vote_for_oldest(i, 0, R);
       printf("node %d gives the vote of request %d on\n", i, r)
     }
#endif
  :: d_step {                 /* a late request */
       late.call && late.who == r && late.where == i ->
       printf("node %d gets late from request %d: %e %d\n", i, r, late.call, late.with);
       carry_out(late.call, r, i, late.with, late.known);
       late.call = 0; late.who = 0; late.where = 0; late.with = 0; late.known = 0
     }
  :: d_step {                 /* a late answer */
       heard_late(r, i) ->
       printf("request %d hears late from node %d: %e %d\n", r, i, slow.stage, slow.token);
       if
       :: request[r].phase < LEAVE ->
          a_stage = slow.stage; a_token = slow.token; a_floor = slow.floor; a_back = slow.back;
          a_live = slow.live;          /* its deadline counts from the sending: it may be over */
          take(slow.call, r, i)
       :: else
       fi;
       forget_slow()
     }
  od
}

/* ---- One request ------------------------------------------------------------------------------------------------ */

proctype Client(byte r) {
  do
  :: d_step {                 /* a majority votes for it: write its token to those nodes */
       request[r].phase == WAIT && voted(r) ->
       request[r].phase = FENCE;
       request[r].token = (request[r].tried -> request[r].renounced + 1 : 0);
       request[r].round = 0;
       for (j : 0 .. N - 1) {
         if
         :: counts(r, j) ->
            request[r].round = request[r].round | bit_of(j);
            if
            :: request[r].at[j].token > request[r].token -> request[r].token = request[r].at[j].token
            :: else
            fi
         :: else
         fi
       };
       request[r].joins = (joined(r, 0, 1) || joined(r, 0, 2) || joined(r, 1, 2));
       if
       :: request[r].joins ->
          request[r].token = (joined(r, 0, 1) || joined(r, 0, 2) -> request[r].at[0].token : request[r].at[1].token)
       :: else
       fi;
       request[r].tried = (request[r].token > request[r].tried -> request[r].token : request[r].tried)
     }
  :: d_step {                 /* its client distrusts nodes, or they are too far away */
       blinds && request[r].phase <= FENCE && !request[r].blind -> blinds--; request[r].blind = 1;
       printf("request %d: its client cannot count votes\n", r)
     }
  :: d_step {
       request[r].blind && !has(BLIND, r) -> request[r].blind = 0;
       printf("request %d: its client can count votes again\n", r)
     }
  :: d_step {                 /* too few took it */
       request[r].phase == FENCE && request[r].round == 0 ->
       request[r].phase = WAIT; request[r].token = 0; request[r].joins = 0
     }
  :: d_step {                 /* the body is over */
       request[r].phase == HOLD && !has(STAYS, r) -> leave(r)
     }
#ifdef GIVE_UP
  :: d_step {                 /* cancelled, or a time-out */
       request[r].phase <= FENCE && has(GIVE_UP, r) -> leave(r)
     }
#endif
  :: d_step {                 /* all have heard; for those that are dead, the lease is over */
       request[r].phase == LEAVE &&
       !(request[r].round & (node[0].up + 2 * node[1].up + 4 * node[2].up)) -> over(r)
     }
  :: d_step {
       crashes && request[r].phase <= HOLD -> crashes--; over(r);
       printf("the client of request %d dies\n", r)
     }
  od
}

/* ---- Time, and what happens to nodes ---------------------------------------------------------------------------- */

#define all_well (node[0].up && node[0].believed && node[1].up && node[1].believed && node[2].up && node[2].believed)

inline connections_break(i) { /* what was under way to the old server is lost */
  if
  :: late.call && late.where == i -> late.call = 0; late.who = 0; late.where = 0; late.with = 0; late.known = 0
  :: else
  fi;
  if
  :: slow.call && slow.where == i ->
     request[slow.who].round = ((slow.call == WRITE || slow.call == HELD) && request[slow.who].phase == FENCE ->
       request[slow.who].round & ~bit_of(i) : request[slow.who].round);
     forget_slow()
  :: else
  fi
}

proctype Fate(byte i) {
  byte r;
  do
  :: d_step {                 /* the node is dead, for good */
       deaths && all_well && may_die -> deaths--;
       printf("node %d is dead\n", i);
       node[i].up = 0; node[i].last = 0;
       for (k : 0 .. R - 1) { node[i].stage[k] = 0; node[i].token[k] = 0 }
       connections_break(i)
     }
  :: d_step {                 /* it restarts, empty: what it said before holds until those leases are over */
       restarts && all_well -> restarts--;
       printf("node %d restarts, empty\n", i);
       node[i].believed = 0; node[i].blank = 1;
#ifdef CLOCKS_DIFFER
       node[i].last = CLOCK(i) + 5;
#else
       for (k : 0 .. N - 1) { node[i].last = (node[k].last > node[i].last -> node[k].last : node[i].last) };
#endif
       for (k : 0 .. R - 1) {
         node[i].stage[k] = 0; node[i].token[k] = 0;
         request[k].at[i].old = (request[k].at[i].stage != NONE || request[k].at[i].live || request[k].at[i].notice);
         request[k].at[i].yielding = 0;
         request[k].before = request[k].before | (request[k].phase == HOLD -> request[k].lease & bit_of(i) : 0)
       }
       connections_break(i)
     }
  :: d_step {                 /* restart_delay is over, and so are the leases of before */
       node[i].up && !node[i].believed ->
       node[i].believed = 1;
       printf("node %d counts again\n", i);
       for (r : 0 .. R - 1) {
         if
         :: ballot.old -> deadline_is_over(r, i)
         :: else ->                    /* a newer answer keeps the place; the lease may rest on the older one */
            live = ballot.live;
            if
            :: request[r].phase == HOLD && has(request[r].before, i) -> deadline_is_over(r, i); ballot.live = live && request[r].phase == HOLD
            :: else
            fi
         fi
       };
       r = 0
     }
  od
}

init {
  byte r, i;
  atomic {
    for (i : 0 .. N - 1) { node[i].up = 1; node[i].believed = 1; node[i].blank = 1; node[i].last = CLOCK(i) };
#ifdef DEAD
    node[DEAD].up = 0;
#endif
#ifdef FIRST_HOLDS
    for (i : 0 .. N - 1) {
      node[i].blank = 0; node[i].last = 40; node[i].stage[0] = C; node[i].token[0] = 40;
      request[0].at[i].stage = C; request[0].at[i].token = 40; request[0].at[i].live = 1
    };
    request[0].phase = HOLD; request[0].token = 40; request[0].highest = 40; request[0].lease = 7; greatest = 40;
#endif
    for (r : 0 .. R - 1) {
      request[r].blind = has(BLIND, r);
      run Client(r);
      for (i : 0 .. N - 1) { run Link(r, i) }
    };
    for (i : 0 .. N - 1) { run Fate(i) };
    r = 0; i = 0
  }
}

/* Liveness of a lease: it comes to rest on all nodes, so that one may die. (It may be lost before, by faults.) */
#ifdef SECURE
#define rests_on_all(r)  (request[r].phase == HOLD && request[r].lease == 7)
ltl secure { <> (request[SECURE].phase == OVER || rests_on_all(SECURE)) }
#else

/* Liveness: as long as a majority is up and messages arrive in the end, everybody gets in, and so out again. */
#ifdef LIVENESS
#define served(r)  (has(BLIND, r) || request[r].phase == OVER)
ltl all_served { <> (served(0) && served(1)
#if R > 2
  && served(2)
#endif
  ) }
#endif
#endif
